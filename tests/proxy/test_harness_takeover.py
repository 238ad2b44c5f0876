"""Every harness, in a sandbox, when the proxy worker is killed inside an answer and another one takes over."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harness_runs import EVERY, installed, says
from proxy_fakes import Script, ScriptedEngine
from proxy_worker_runs import MAX_CONTEXT, MAX_NEW, killable_worker
from test_harness_loops import steps

from gyre.core.system.paths import HOME
from gyre.harnesses import ContextWindow, prefix_of, prepare
from gyre.sandboxes import PROXY_URL, BubblewrapProvider, Mount, SandboxSpec
from gyre.trajectory.tree import TrajectoryTree

pytestmark = pytest.mark.harness


@pytest.mark.parametrize("name", EVERY)
async def test_a_killed_worker_costs_no_execution(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    profile = installed(name)
    engine = ScriptedEngine(Script(proxy_tokenizer, says(steps(name), [])))
    reached = asyncio.Event()

    async def hold(done: int) -> None:
        """Inside the second answer, the first time."""
        if len(engine.requests) == 2 and done >= 20 and not reached.is_set():
            reached.set()
            await asyncio.Event().wait()

    engine.step = hold
    async with killable_worker(proxy_tokenizer, tmp_path, engine) as worker:
        access = await worker.open("g0-0", name)
        launch = prepare(
            profile,
            prefix_of(profile),
            instruction="Do the steps.",
            access=access,
            proxy_url=PROXY_URL,
            home=HOME,
            window=ContextWindow(max_context=MAX_CONTEXT, max_output=MAX_NEW),
        )
        mounts = [Mount(source=source, target=target) for target, source in launch.mounts.items()]
        spec = SandboxSpec(
            name=name, root=tmp_path / "box", env=launch.env, mounts=mounts, proxy_socket=Path(access.socket)
        )
        sandbox = BubblewrapProvider().create(spec)
        try:
            await sandbox.start()
            for path, text in launch.files.items():
                await sandbox.write(f"{HOME}/{path}", text)
            (tmp_path / "prompt").write_text(launch.stdin)
            running = asyncio.create_task(
                sandbox.exec(
                    launch.argv,
                    stdin=tmp_path / "prompt",
                    stdout=tmp_path / "out",
                    stderr=tmp_path / "err",
                    timeout_s=180,
                    boot_timeout_s=profile.start_timeout_s,
                )
            )
            async with asyncio.timeout(150):
                await reached.wait()
            await worker.kill()
            await worker.start()
            result = await running
        finally:
            await sandbox.close(keep=True)
        summary = await worker.control.close_session("g0-0")
        records = worker.records("g0-0")
    shown = (tmp_path / "out").read_text()[-1500:] + (tmp_path / "err").read_text()[-1500:]
    assert result.exit_code == 0, shown
    tree = TrajectoryTree.from_records(records)
    assert [leaf.record.role for leaf in tree.leaves() if leaf.eligible] == ["main"], "one exact path"
    assert not any("prefix_break" in record.flags for record in records)
    if name == "qwen_code":
        # It ends its run at a cut stream, whoever cut it, and says that all is well.
        assert (summary.calls, summary.orphans) == (1, 0)
        return
    assert (spec.workspace / "two.txt").read_text() == "two-ok", shown
    assert (summary.calls, summary.orphans) == (3, 0)
    # The answer that was cut has been sampled again, and nothing else.
    assert len(engine.requests) == 4
