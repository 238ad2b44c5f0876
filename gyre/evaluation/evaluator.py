"""Runs a task's tests/test.sh over a preserved workspace and makes an `Assessment` of it.

Every grading gets a fresh sandbox over a *copy* of the workspace: the preserved state stays bit-identical, so grading
may be repeated, and /tests exists nowhere else. The exit code of test.sh is ignored; only the reward file counts.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from gyre.core.clock import Clock, SystemClock
from gyre.core.errors import SandboxError
from gyre.core.records import Assessment
from gyre.core.text import storable
from gyre.evaluation.artifact import digest
from gyre.evaluation.config import EvaluationSection
from gyre.evaluation.limits import task_limits
from gyre.evaluation.reward import InvalidReward, read_reward
from gyre.sandboxes import Mount, Sandbox, SandboxLimits, SandboxSpec
from gyre.tasks import Task

EVALUATOR = "tests/test.sh"


class Preserved(msgspec.Struct, frozen=True, kw_only=True):
    """The state that an execution left: a closed sandbox's specification and the digest of its workspace."""

    execution_id: str
    sandbox: SandboxSpec
    digest: str

    @property
    def artifact(self) -> str:
        return f"{self.sandbox.workspace}@sha256:{self.digest}"


class Evaluator:
    """Grades preserved states. Every failure is an invalid assessment that says why, never an exception."""

    def __init__(
        self,
        make_sandbox: Callable[[SandboxSpec], Sandbox],
        section: EvaluationSection | None = None,
        *,
        limits: SandboxLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._section = section or EvaluationSection()
        self._make_sandbox = make_sandbox
        self._limits = limits or SandboxLimits()
        self._clock = clock or SystemClock()

    async def preserve(self, execution_id: str, sandbox: SandboxSpec) -> Preserved:
        """The state of a closed sandbox."""
        content = await digest(sandbox.workspace, timeout_s=self._section.digest_s)
        return Preserved(execution_id=execution_id, sandbox=sandbox, digest=content)

    async def assess(
        self, preserved: Preserved, task: Task, *, timeout_s: float, log: Path, boot_timeout_s: float = 60.0
    ) -> Assessment:
        """One grading within `timeout_s`, designated when it is valid; the verifier's output is appended to `log`."""
        started = self._clock.now()
        score: float | None = None
        detail: dict[str, float] = {}
        error = ""
        try:
            score, detail = await self._graded(preserved, task, timeout_s, boot_timeout_s, log)
        except (InvalidReward, SandboxError, OSError) as problem:
            error = storable(str(problem))
        return Assessment(
            execution_id=preserved.execution_id,
            artifact=preserved.artifact,
            evaluator=EVALUATOR,
            score=score,
            valid=score is not None,
            designated=score is not None,
            detail=detail,
            error=error,
            seconds=self._clock.now() - started,
        )

    async def _graded(
        self, preserved: Preserved, task: Task, timeout_s: float, boot_timeout_s: float, log: Path
    ) -> tuple[float, dict[str, float]]:
        before = preserved.sandbox
        logs = [Mount(source=before.logs / part, target=f"/logs/{part}") for part in ("agent", "artifacts")]
        spec = SandboxSpec(
            name=f"{before.name}.grading",
            root=before.root.with_name(f"{before.root.name}.grading"),
            workdir=task.workdir,
            env={**task.env, **task.verifier_env},
            mounts=[*logs, Mount(source=task.tests, target="/tests")],
            limits=task_limits(task, self._limits),
        )
        sandbox = self._make_sandbox(spec)
        # What an interrupted grading left must not count: neither its files nor its reward.
        await sandbox.close(keep=False)
        try:
            await sandbox.start()
            await sandbox.restore(before)
            result = await sandbox.exec(
                ["/bin/bash", "/tests/test.sh"],
                stdout=log,
                stderr=log,
                timeout_s=timeout_s,
                boot_timeout_s=boot_timeout_s,
            )
            if result.exceeded:
                raise InvalidReward(f"tests/test.sh of {task.name} was ended: {result.exceeded}")
            if result.timed_out:
                raise InvalidReward(f"tests/test.sh of {task.name} did not end within {timeout_s:g} s")
            return read_reward(spec.logs / "verifier")
        finally:
            await sandbox.close(keep=False)
