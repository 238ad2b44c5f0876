"""The life of executions in real sandboxes with a shell script as harness: T29, T31, T33, T34, T35."""

import asyncio
import errno
import math
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import json
from tiny_tasks import WINDOW, TaskWriter, make_spec

from gyre.core.errors import ConfigError, GyreError, SandboxError
from gyre.core.records import Validity
from gyre.evaluation import EvaluationSection
from gyre.evaluation.base import Preserved
from gyre.evaluation.config import HookSection, TestsSection
from gyre.evaluation.tests import TaskTests
from gyre.runner.config import RunnerConfig, RunnerSection
from gyre.runner.worker import LocalRunner
from gyre.store import RunStore
from gyre.tasks import Task


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    (tmp_path / "run").mkdir()
    return RunStore(tmp_path / "run/gyre.sqlite")


@pytest.fixture
async def runner(tmp_path: Path, shell_root: Path, store: RunStore) -> AsyncIterator[LocalRunner]:
    config = RunnerConfig(
        run_dir=str(tmp_path / "run"),
        window=WINDOW,
        harness_root=str(shell_root),
        section=RunnerSection(boots=2),
        evaluation=EvaluationSection(retry_s=0.0),
    )
    runner = LocalRunner(config, store)
    yield runner
    await runner.shutdown()


async def test_a_completed_execution(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore, tmp_path: Path, proxy_socket: Path
) -> None:
    check = "grep -x 'http://127.0.0.1:8080/x/secret key-1' out && [ -f seed ] && echo 1 > /logs/verifier/reward.txt"
    task = write_task('cat ~/notes/hello; [ -S /run/proxy.sock ] && echo "$MODEL_URL $MODEL_KEY" > out', check)
    await runner.start(make_spec("e-0", task, socket=proxy_socket))
    await runner.start(make_spec("e-0", task, socket=proxy_socket))
    await runner.wait_closed("e-0")
    report = await runner.wait("e-0")
    assert (report.outcome.validity, report.outcome.reward, report.outcome.cause) == (Validity.VALID, 1.0, "completed")
    assert report.outcome.harness_exit_code == 0
    assert (Path(report.workspace) / "out").exists()
    assert (tmp_path / "run/logs/executions/e-0.out").read_text() == "key key-1 costs 1$"
    assert await runner.running() == []
    assert store.outcome("e-0") == report.outcome
    assert store.assessments("e-0") == [report.outcome.assessment]


async def test_t31_a_harness_timeout_is_scored(runner: LocalRunner, write_task: TaskWriter) -> None:
    task = write_task("echo half > out; sleep 99", "[ -f out ] && echo 0.5 > /logs/verifier/reward.txt")
    await runner.start(make_spec("e-0", task, harness_s=2))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward, outcome.cause) == (Validity.VALID, 0.5, "harness_timeout")


async def test_t31_the_tasks_own_timeout_holds_too(runner: LocalRunner, write_task: TaskWriter) -> None:
    task = write_task("sleep 99", manifest="[agent]\ntimeout_sec = 0.2")
    await runner.start(make_spec("e-0", task))
    assert (await runner.wait("e-0")).outcome.cause == "harness_timeout"


async def test_t28_a_harness_that_dies_without_work_is_no_zero(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore
) -> None:
    await runner.start(make_spec("e-0", write_task("exit 3")))
    await runner.start(make_spec("e-1", write_task("echo x > out; exit 3", name="worked")))
    lost, worked = (await runner.wait("e-0")).outcome, (await runner.wait("e-1")).outcome
    assert (lost.validity, lost.cause, lost.harness_exit_code) == (Validity.NO_WORK, "harness_exit", 3)
    assert store.assessments("e-0") == []
    assert (worked.validity, worked.reward, worked.cause) == (Validity.VALID, 1.0, "harness_exit")


async def test_t28_a_policy_that_fills_its_context_is_a_valid_zero(runner: LocalRunner, write_task: TaskWriter) -> None:
    await runner.start(make_spec("e-0", write_task("echo CONTEXT FULL; exit 1", "echo 0 > /logs/verifier/reward.txt")))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward, outcome.cause) == (Validity.VALID, 0.0, "harness_exit")


async def test_t29_a_failed_grading_is_repeated_on_the_same_state(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore, tmp_path: Path
) -> None:
    # Deletes what it grades and fails; the repetition must see the untouched state again.
    flaky = "cat out || exit 1; rm out"
    task = write_task("echo x > out", flaky)
    await runner.start(make_spec("e-0", task))
    outcome = (await runner.wait("e-0")).outcome
    first, second = store.assessments("e-0")
    assert first.artifact == second.artifact
    assert (first.valid, first.designated) == (False, False)
    assert outcome.validity is Validity.UNRESOLVED
    assert "wrote neither" in outcome.message
    assert (tmp_path / "run/logs/executions/e-0.verifier").read_text().startswith("x\nx\n")
    assert (tmp_path / "run/workspaces/e-0/app/out").exists()


async def test_t33_a_hung_verifier_is_bounded_and_unresolved(runner: LocalRunner, write_task: TaskWriter) -> None:
    task = write_task("echo x > out", "echo 1 > /logs/verifier/reward.txt; sleep 99")
    await runner.start(make_spec("e-0", task, evaluation_s=0.2))
    outcome = (await runner.wait("e-0")).outcome
    assert outcome.validity is Validity.UNRESOLVED
    assert "did not end within 0.2 s" in outcome.message


HOSTILE_WORK = {
    "a loop without end": ("while :; do :; done", "timed_out"),
    "a kill of the grader": ("kill -9 $PPID; sleep 99", "grader_killed"),
    "a reward beyond the range": ("echo 1e9 > /logs/verifier/reward.txt; kill -9 $PPID", "grader_killed"),
    "a reward out of the range": ("echo 2", "out_of_range"),
    "a reward that is no number": ("echo nan", "no_reward"),
    "a pipe for a reward file": ("rm -f /logs/verifier/*; mkfifo /logs/verifier/reward.json", "no_reward"),
}


@pytest.mark.parametrize("name", HOSTILE_WORK)
async def test_work_over_which_its_grader_fails_is_a_valid_zero(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore, name: str
) -> None:
    """The grader runs what the policy wrote and gives what it says, and zero for the start state."""
    work, flag = HOSTILE_WORK[name]
    grader = "[ -f run.sh ] || echo 0 > /logs/verifier/reward.txt; [ ! -f run.sh ] || bash run.sh > /tmp/said; "
    grader += "[ ! -s /tmp/said ] || cp /tmp/said /logs/verifier/reward.txt"
    await runner.start(make_spec("e-0", write_task(f"echo '{work}' > run.sh", grader), evaluation_s=2))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward) == (Validity.VALID, 0.0)
    assert outcome.assessment
    assert outcome.assessment.flags == [flag, "failed_on_work"]
    assert [each.fault for each in store.assessments("e-0")] == ["grader", "grader", ""]


async def test_a_directory_that_nobody_may_enter_is_graded_like_any_other(
    runner: LocalRunner, write_task: TaskWriter
) -> None:
    task = write_task("chmod 000 .", "[ -f seed ] && echo 0.25 > /logs/verifier/reward.txt")
    await runner.start(make_spec("e-0", task))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward) == (Validity.VALID, 0.25)


async def test_a_grader_that_fails_over_the_start_state_is_tried_there_once_for_all_executions(
    runner: LocalRunner, write_task: TaskWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded: list[str] = []
    grade = TaskTests.grade

    async def counted(self: TaskTests, work: Preserved, task: Task, root: Path, *rest: Any, **more: Any) -> object:
        graded.append(root.name)
        return await grade(self, work, task, root, *rest, **more)

    monkeypatch.setattr(TaskTests, "grade", counted)
    task = write_task("echo x > out", "true")
    for name in ("e-0", "e-1", "e-2"):
        await runner.start(make_spec(name, task))
    outcomes = [(await runner.wait(name)).outcome for name in ("e-0", "e-1", "e-2")]
    assert {outcome.validity for outcome in outcomes} == {Validity.UNRESOLVED}
    assert len([name for name in graded if name.startswith("baseline")]) == 1


async def test_a_platform_that_fails_while_it_grades_says_nothing_of_the_work(
    runner: LocalRunner, write_task: TaskWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> object:
        raise SandboxError("no space")

    monkeypatch.setattr(TaskTests, "grade", full)
    await runner.start(make_spec("e-0", write_task("echo x > out")))
    outcome = (await runner.wait("e-0")).outcome
    assert outcome.validity is Validity.UNRESOLVED
    assert "no space" in outcome.message


@pytest.mark.parametrize(("bounds", "reward"), [("[-1, 0]", -1.0), ("[0, 2.5]", 2.0)])
async def test_a_task_may_have_a_reward_range_of_its_own(
    runner: LocalRunner, write_task: TaskWriter, bounds: str, reward: float
) -> None:
    task = write_task(
        "x=1", f"echo {reward} > /logs/verifier/reward.txt", manifest=f"[verifier]\nreward_range = {bounds}"
    )
    await runner.start(make_spec("e-0", task))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward) == (Validity.VALID, reward)


async def test_the_policys_modules_are_not_where_a_graders_python_looks_first(
    runner: LocalRunner, write_task: TaskWriter
) -> None:
    fake = 'echo \'def dump(value, file): file.write(chr(123) + chr(34) + "reward" + chr(34) + ":1}")\' > json.py'
    grader = """python3 -c 'import json; json.dump({"reward": 0}, open("/logs/verifier/reward.json", "w"))'"""
    await runner.start(make_spec("e-0", write_task(fake, grader)))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward) == (Validity.VALID, 0.0)


async def test_several_reward_files_are_a_fact_of_the_outcome(runner: LocalRunner, write_task: TaskWriter) -> None:
    grader = """echo 1 > /logs/verifier/reward.txt; echo '{"reward": 0}' > /logs/verifier/reward.json"""
    await runner.start(make_spec("e-0", write_task("x=1", grader)))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward) == (Validity.VALID, 0.0)
    assert outcome.assessment
    assert outcome.assessment.flags == ["several_reward_files"]


async def test_a_grading_leaves_no_sandbox_behind(runner: LocalRunner, write_task: TaskWriter, tmp_path: Path) -> None:
    await runner.start(make_spec("e-0", write_task("echo x > out", "sleep 99"), evaluation_s=0.2))
    await runner.wait("e-0")
    assert [path.name for path in (tmp_path / "run/workspaces").iterdir()] == ["e-0"]


async def test_t33_t34_a_hung_boot_is_retried_once_and_is_no_work(
    store: RunStore, shell_root: Path, write_task: TaskWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin/bwrap"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho boot >> {tmp_path}/boots\nexec sleep 99\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    runner = LocalRunner(
        RunnerConfig(run_dir=str(tmp_path / "run"), window=WINDOW, harness_root=str(shell_root)), store
    )
    await runner.start(make_spec("e-0", write_task("true"), boot_s=0.2))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.cause) == (Validity.NO_WORK, "boot_failed")
    assert "not booted within 0.2 s" in outcome.message
    assert (tmp_path / "boots").read_text() == "boot\nboot\n"


async def test_t33_the_overall_budget_excludes(runner: LocalRunner, write_task: TaskWriter, store: RunStore) -> None:
    await runner.start(make_spec("e-0", write_task("echo x > out; sleep 99"), overall_s=0.3))
    await runner.wait_closed("e-0")
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.cause) == (Validity.UNRESOLVED, "overall_timeout")
    assert store.outcome("e-0") == outcome


async def test_t34_cancel_ends_everything_and_is_recorded(
    runner: LocalRunner, write_task: TaskWriter, tmp_path: Path
) -> None:
    await runner.start(make_spec("e-0", write_task("trap : TERM; while :; do read -t 1 x <> /dev/null; done")))
    while not (tmp_path / "run/workspaces/e-0/prompt").exists():  # noqa: ASYNC110 — the runner shows no other event
        await asyncio.sleep(0.01)
    assert await runner.running() == ["e-0"]
    await runner.cancel("e-0")
    assert await runner.running() == []
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.cause) == (Validity.UNRESOLVED, "cancelled")
    await runner.cancel("e-0")


async def test_t35_the_policy_cannot_reach_tests_solution_or_reward(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore
) -> None:
    cheat = """
    ls /tests /solution > seen 2>/dev/null
    echo 1 > /logs/verifier/reward.txt
    mkdir tests; echo 'echo 1 > /logs/verifier/reward.txt' > tests/test.sh
    ln -s /logs/verifier/reward.txt out
    setsid -f bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done'
    """
    await runner.start(
        make_spec("e-0", write_task(cheat, "[ ! -s seen ] && exit 0; echo 0 > /logs/verifier/reward.txt"))
    )
    outcome = (await runner.wait("e-0")).outcome
    assert outcome.validity is Validity.UNRESOLVED
    assert "wrote neither" in outcome.message


async def test_a_broken_task_is_an_outcome(runner: LocalRunner, tmp_path: Path) -> None:
    await runner.start(make_spec("e-0", tmp_path / "nowhere"))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.cause) == (Validity.NO_WORK, "boot_failed")
    assert "nowhere" in outcome.message


async def test_a_machine_without_processes_or_disk_is_an_outcome(
    runner: LocalRunner, write_task: TaskWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("gyre.sandboxes.machine.copy", full)
    await runner.start(make_spec("e-0", write_task("echo x > out")))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.cause) == (Validity.NO_WORK, "boot_failed")
    assert "Resource temporarily unavailable" in outcome.message


async def test_an_unknown_harness_or_execution_is_refused(runner: LocalRunner, write_task: TaskWriter) -> None:
    with pytest.raises(ConfigError, match="unknown; there are shell"):
        await runner.start(make_spec("e-0", write_task("true"), harness="nope"))
    with pytest.raises(GyreError, match="never started"):
        await runner.wait("e-9")


async def test_shutdown_leaves_no_outcome_so_that_a_resumed_run_starts_again(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore
) -> None:
    await runner.start(make_spec("e-0", write_task("sleep 99")))
    await runner.shutdown()
    assert store.outcome("e-0") is None
    assert await runner.running() == []


HOSTILE_GRADERS = {
    "1e200": "echo 1e200 > /logs/verifier/reward.txt",
    "a surrogate": """printf '{"reward": 0.5, "\\\\ud800": 1}' > /logs/verifier/reward.json""",
    "NaN": """echo '{"reward": NaN}' > /logs/verifier/reward.json""",
    "twice": """echo '{"reward": 0, "reward": 1}' > /logs/verifier/reward.json""",
    "deep": """printf '[%.0s' $(seq 100000) > /logs/verifier/reward.json""",
    "not UTF-8": r"""printf '\\xff\\xfe' > /logs/verifier/reward.txt""",
    "a pipe": "mkfifo /logs/verifier/reward.json",
    "a link": "ln -s /etc/passwd /logs/verifier/reward.txt",
    "a directory": "mkdir /logs/verifier/reward.json",
    "huge": "head -c 3000000 /dev/zero > /logs/verifier/reward.txt",
    "no permission": "echo 1 > /logs/verifier/reward.txt; chmod 0 /logs/verifier/reward.txt /logs/verifier",
    "a killed grader": "kill -9 $$",
}


@pytest.mark.parametrize("name", HOSTILE_GRADERS)
async def test_nothing_that_a_grader_writes_is_raised_by_the_runner(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore, name: str
) -> None:
    await runner.start(make_spec("e-0", write_task("echo x > out", HOSTILE_GRADERS[name])))
    report = await runner.wait("e-0")
    assert store.outcome("e-0") == report.outcome
    assert math.isfinite(report.outcome.reward)
    json.encode(report)


HOSTILE_WORKSPACES = {
    "names that are no text": r"""touch "$(printf 'a\\xff\\xfe')" "$(printf 'new\\nline')" -- '-rf'""",
    "no permissions": "mkdir d; touch d/f; chmod 0 d/f d .",
    "pipes and sockets": """mkfifo p; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("s")'""",
    "loops of links": "ln -s . self; ln -s a b; ln -s b a; ln -s / root",
    "holes": "for i in $(seq 20); do truncate -s 1000M h$i; done",
    "a deep tree": "for i in $(seq 300); do mkdir ddddddddddddd; cd ddddddddddddd; done",
    "a long error": r"""printf 'x%.0s' $(seq 100000) >&2; printf '\\xff\\ud800' >&2; exit 1""",
    "itself removed": "rm -rf -- * .[!.]*; rmdir . ; true",
}


@pytest.mark.parametrize("name", HOSTILE_WORKSPACES)
async def test_nothing_that_a_workspace_contains_is_raised_by_the_runner(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore, name: str
) -> None:
    await runner.start(make_spec("e-0", write_task(HOSTILE_WORKSPACES[name])))
    report = await runner.wait("e-0")
    assert store.outcome("e-0") == report.outcome
    json.encode(report)


async def test_an_error_of_the_runner_itself_ends_the_execution_alone(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise KeyError("\ud800")

    monkeypatch.setattr(runner._evaluators, "preserve", broken)
    await runner.start(make_spec("e-0", write_task("echo x > out")))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.cause) == (Validity.UNRESOLVED, "runner_error")
    assert "KeyError" in outcome.message
    assert store.outcome("e-0") == outcome


async def test_a_variable_that_no_process_can_be_given_is_no_work(runner: LocalRunner, write_task: TaskWriter) -> None:
    await runner.start(make_spec("e-0", write_task("true", manifest='[environment.env]\n"A\\u0000B" = "1"')))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.cause) == (Validity.NO_WORK, "boot_failed")


@pytest.mark.parametrize(("rule", "reward", "by"), [("first", 1.0, "tests"), ("mean", 0.75, "mean of tests, h")])
async def test_several_evaluators_have_their_say_and_the_rule_designates(
    tmp_path: Path,
    shell_root: Path,
    write_task: TaskWriter,
    store: RunStore,
    monkeypatch: pytest.MonkeyPatch,
    rule: Literal["first", "mean"],
    reward: float,
    by: str,
) -> None:
    (tmp_path / "half_hook.py").write_text("def half(workspace, task, trajectory): return 0.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    evaluators = (TestsSection(), HookSection(name="h", function="half_hook:half"))
    config = RunnerConfig(
        run_dir=str(tmp_path / "run"),
        window=WINDOW,
        harness_root=str(shell_root),
        evaluation=EvaluationSection(evaluators=evaluators, rule=rule),
    )
    runner = LocalRunner(config, store)
    await runner.start(make_spec("e-0", write_task("echo x > out")))
    outcome = (await runner.wait("e-0")).outcome
    await runner.shutdown()
    assert (outcome.validity, outcome.reward) == (Validity.VALID, reward)
    stored = store.assessments("e-0")
    assert [each.evaluator for each in stored if each.designated] == [by]
    assert {each.evaluator: each.score for each in stored if each.evaluator in ("tests", "h")} == {
        "tests": 1.0,
        "h": 0.5,
    }
    assert len({each.artifact for each in stored}) == 1
    assert all(each.version for each in stored if each.evaluator in ("tests", "h"))


ATTACK = """
import os, signal
done = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) not in (1, os.getpid()):
        try:
            os.kill(int(pid), signal.SIGKILL)
            done.append("killed " + pid)
        except OSError:
            pass
for path in ("/tests/test.sh", "/tests", "/logs/verifier", "/proc/1/environ", f"/proc/{os.getppid()}/environ"):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        done.append("read " + path)
    except OSError:
        pass
for path in ("/logs/verifier/reward.txt", "/tests/test.sh", "/tests/new"):
    try:
        open(path, "w").write("1")
        done.append("wrote " + path)
    except OSError:
        pass
try:
    os.setuid(0)
    done.append("became root")
except OSError:
    pass
open("/app/did", "w").write(repr(done))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a sandbox two users")
async def test_what_a_grader_runs_as_the_agent_reaches_neither_tests_nor_reward_nor_grader(
    runner: LocalRunner, write_task: TaskWriter, store: RunStore
) -> None:
    grader = """
    [ "$(id -u)" = 0 ] || exit 0
    [ -f attack.py ] && setpriv --reuid=agent --regid=agent --clear-groups python3 attack.py
    echo 0 > /logs/verifier/reward.txt
    echo "{\\"reward\\": 0, \\"did\\": $(wc -c < /app/did)}" > /logs/verifier/reward.json
    """
    task = write_task(f"cat > attack.py <<'END'\n{ATTACK}\nEND", grader)
    await runner.start(make_spec("e-0", task))
    outcome = (await runner.wait("e-0")).outcome
    assert outcome.validity is Validity.VALID, outcome.message
    assert outcome.assessment
    # The file says "[]": nothing of all that was possible.
    assert (outcome.reward, outcome.assessment.detail) == (0.0, {"reward": 0.0, "did": 2.0})


@pytest.mark.parametrize("user", ["root", "agent"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a sandbox two users")
async def test_a_task_says_who_runs_its_grader(runner: LocalRunner, write_task: TaskWriter, user: str) -> None:
    grader = f'[ "$(id -un)" = {user} ] && [ -r /tests/test.sh ] && echo 1 > /logs/verifier/reward.txt'
    await runner.start(make_spec("e-0", write_task("x=1", grader, manifest=f'[verifier]\nuser = "{user}"')))
    assert (await runner.wait("e-0")).outcome.reward == 1.0


SHIPPED = Path(__file__).parents[2] / "examples/tasks"
CODE_OF_THE_POLICY = {
    "wrong": "def add(a, b): return 0\nsub = mul = add",
    "kills the grader and writes the reward": """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if int(pid) not in (1, os.getpid()): os.kill(int(pid), signal.SIGKILL)
    except OSError: pass
open("/logs/verifier/reward.json", "w").write('{"reward": 1.0}')
""",
    "overwrites the reward from a daemon": """
import os
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2): os.close(fd)
    while True:
        try:
            if os.path.getsize("/logs/verifier/reward.json"):
                open("/logs/verifier/reward.json", "w").write('{"reward": 1.0}'); os._exit(0)
        except OSError: pass
""",
    "reads the tests": """
import os, re, sys
source = open("/tests/test.sh").read().split("CALL =")[0].split("from pathlib import Path")[1]
names = {}
exec(source, names)
sys.stdout.write(str([names["EXPECTED"][os.path.basename(__file__)[:-3]](*c) for c in names["CASES"]]) + "\\n")
sys.stdout.flush(); os._exit(0)
""",
    "hangs": "while True: pass",
    "floods": "import sys\nwhile True: sys.stdout.write('x' * 100000)",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.live if name in ("hangs", "floods") else ())  # seconds of processor
        for name in CODE_OF_THE_POLICY
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a sandbox two users")
async def test_shipped_graders_give_nothing_to_code_that_attacks_them(
    runner: LocalRunner, tmp_path: Path, name: str
) -> None:
    task = tmp_path / "calc"
    shutil.copytree(SHIPPED / "repo-tests-calc", task)
    code = "\n".join(f"cat > {each}.py <<'END'\n{CODE_OF_THE_POLICY[name]}\nEND" for each in ("add", "sub", "mul"))
    (task / "instruction.md").write_text(code)
    await runner.start(make_spec("e-0", task, evaluation_s=30, overall_s=120))
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward) == (Validity.VALID, 0.0)
