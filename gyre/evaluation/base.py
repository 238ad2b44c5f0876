"""What is graded, who grades, and what a grading says."""

from pathlib import Path
from typing import Literal, Protocol

import msgspec

from gyre.core.records import Assessment
from gyre.sandboxes import SandboxSpec
from gyre.tasks import Task

Fault = Literal["", "grader", "task", "platform"]
"""Why there is no score: "grader", it ran and gave none, which the work may be the cause of; "task", it fails over the
start state in the same way, so no execution of the task can be graded; "platform", it could not run."""


class Preserved(msgspec.Struct, frozen=True, kw_only=True):
    """The state that an execution left: a closed sandbox's specification and the digest of its workspace."""

    execution_id: str
    sandbox: SandboxSpec
    digest: str
    trajectory: dict[str, int] = {}
    """`core.records.CallFacts` by name: calls that were answered, cut and lost."""

    @property
    def artifact(self) -> str:
        return f"{self.sandbox.work}@sha256:{self.digest}"


class GradingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one grading of a task's tests."""

    timeout_s: float
    boot_timeout_s: float = 60.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Of one grading."""

    score: float | None = None
    detail: dict[str, float] = {}
    error: str = ""
    """One sentence when there is no score."""
    fault: Fault = ""
    flags: list[str] = []
    """Facts that a reader should see, such as signs of tampering (docs/outcomes.md)."""
    usage: dict[str, float] = {}
    """Tokens read and written, and their cost, of a judge."""


class GraderFailed(Exception):
    """The grader ran and gave no reward that counts; the message says why."""

    def __init__(self, message: str, *flags: str) -> None:
        super().__init__(message)
        self.flags = list(flags)


class Evaluator(Protocol):
    """Assesses preserved states; shared by all executions of a runner. Every failure is an invalid assessment that says
    why, never an exception."""

    name: str
    uses_grader: bool
    """Whether it takes one of the runner's graders while it works."""

    async def assess(self, work: Preserved, task: Task, limits: GradingLimits, log: Path) -> Assessment:
        """One assessment, not designated; what the evaluator says is appended to `log`."""
        ...

    async def settle(
        self, work: Preserved, task: Task, failed: Assessment, limits: GradingLimits, log: Path
    ) -> Assessment | None:
        """The assessment of work over which this evaluator `failed` again and again, when that is the work's fault;
        None when it is not, or cannot be known."""
        ...

    async def close(self) -> None:
        """Ends what is under way."""
        ...
