"""The main job while its processes are killed: it goes on by itself, exact, and trains every group once."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gyre.core import events as ev
from gyre.core.records import Validity
from gyre.store import RunDir
from gyre.store.journal import surviving

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
STEPS = 3
ENGINES = ("engine-0", "engine-1", "engine-2")


def kill(command: int, log: str) -> None:
    """The worker of this command that writes to `log`."""
    for child in psutil.Process(command).children(recursive=True):
        if os.path.realpath(f"/proc/{child.pid}/fd/1").endswith(f"/logs/{log}.log"):
            child.kill()
            return
    raise AssertionError(f"no process writes to {log}.log")


def test_lost_processes_are_replaced_and_a_lost_core_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    command = subprocess.Popen(
        [
            *(sys.executable, "-m", "gyre.cli.main", "train", "examples/quickstart.toml"),
            *(
                f"scheduler.max_steps={STEPS}",
                "scheduler.groups_per_step=2",
                "scheduler.executions_per_group=2",
                "--run-dir",
                str(run.root),
            ),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert command.stdout is not None
    output = []
    struck = 0
    for line in command.stdout:
        output.append(line)
        if " step 1/" in line and struck == 0:
            for log in ("trainer-1", *ENGINES):
                kill(command.pid, log)
            struck = 1
        if " step 2/" in line and struck == 1:
            kill(command.pid, "trainer-0")
            struck = 2
    assert command.wait(timeout=60) == 0, "".join(output)
    assert struck == 2

    with run.open_store(read_only=True) as store:
        events = list(store.events())
        outcomes = store.outcomes()
    lost = {event.name for event in events if isinstance(event, ev.ProcessLost)}
    assert lost == {"trainer-0", "trainer-1", *ENGINES}
    replaced = {event.name for event in events if isinstance(event, ev.ProcessRestarted)}
    assert replaced & set(ENGINES), "step 2 needs executions that began when all engines were dead"
    assert [event.resumed_from for event in events if isinstance(event, ev.RunStarted)] == [None]
    (back,) = [event for event in events if isinstance(event, ev.RunWentBack)]
    assert back.version in (0, 1, 2), "the newest checkpoint may still be under way"
    closed = [event for event in events if isinstance(event, ev.ExecutionClosed) and event.cause == "cancelled"]
    assert all(event.t > max(step.t for step in events if isinstance(step, ev.StepDone)) for event in closed)
    assert not [event for event in events if isinstance(event, ev.InvariantBroken)]

    steps = [event for event in surviving(events) if isinstance(event, ev.StepDone)]
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    groups = [group for step in steps for group in step.groups]
    assert len(groups) == len(set(groups)), "every group is trained once in the surviving line"
    assert all(step.logprob_gap_max <= 1e-3 for step in steps if step.logprob_gap_count)
    assert sum(outcome.validity is Validity.VALID for outcome in outcomes.values()) >= 2 * 2 * STEPS
    proxy = [event for event in events if isinstance(event, ev.ProxySampled)]
    assert max(event.prompt_mismatches for event in proxy) == 0
    assert max(event.harness_errors_from_transitions for event in proxy) == 0
