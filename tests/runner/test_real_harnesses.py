"""The real Claude Code and mini-swe-agent, unmodified, in sandboxes whose only way out is a scripted model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ScriptedModel, serving
from tiny_tasks import WINDOW, TaskWriter, make_spec

from gyre.core.errors import ConfigError
from gyre.core.records import Validity
from gyre.harnesses import check, default_root, load_profile, prefix_of
from gyre.runner.config import RunnerConfig
from gyre.runner.worker import LocalRunner
from gyre.store import RunStore

pytestmark = pytest.mark.harness

HARNESSES = {"claude_code": "/tmp/harn/claude-220", "mini_swe_agent": "/tmp/harn/mini"}


@pytest.fixture
def harness_root(tmp_path: Path) -> Path:
    """Installed harnesses: those of `make setup`, else those of a development machine."""
    root = tmp_path / "harnesses"
    root.mkdir()
    for name, spare in HARNESSES.items():
        profile = load_profile(name)
        for installed in (prefix_of(profile, default_root()), Path(spare)):
            if installed.is_dir():
                (root / prefix_of(profile).name).symlink_to(installed)
                break
    return root


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, harness_root: Path) -> str:
    try:
        check(load_profile(request.param), harness_root)
    except ConfigError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
async def runner(tmp_path: Path, harness_root: Path) -> AsyncIterator[LocalRunner]:
    (tmp_path / "run").mkdir()
    config = RunnerConfig(run_dir=str(tmp_path / "run"), window=WINDOW, harness_root=str(harness_root))
    runner = LocalRunner(config, RunStore(tmp_path / "run/gyre.sqlite"))
    yield runner
    await runner.shutdown()


def texts(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


INSTRUCTION = 'Write "hi" 😀 to out.txt.\n\n- a list, costs 1$ {{braces}}\n--not-a-flag'


async def test_one_execution(runner: LocalRunner, harness: str, write_task: TaskWriter, proxy_socket: Path) -> None:
    commands = ["echo hi > out.txt; cat seed; id -un", "ls"]
    task = write_task(INSTRUCTION, "grep -qx hi out.txt && echo 1 > /logs/verifier/reward.txt")
    proxy_socket.unlink()
    async with serving(ScriptedModel(commands), proxy_socket) as model:
        budgets = {"boot_s": 60, "harness_s": 300, "evaluation_s": 60, "overall_s": 400}
        await runner.start(make_spec("e-0", task, harness, socket=proxy_socket, **budgets))
        report = await runner.wait("e-0")
    assert (report.outcome.validity, report.outcome.reward, report.outcome.cause) == (Validity.VALID, 1.0, "completed")
    assert len(model.bodies) == 3
    assert set(model.keys) == {"key-1"}
    assert all(path.split(" ")[1].startswith("/x/secret/") for path in model.paths)
    first, second = model.bodies[0]["messages"], model.bodies[1]["messages"]
    prompt = first[-1]["content"]
    assert (prompt if isinstance(prompt, str) else prompt[-1]["text"]) == INSTRUCTION
    assert "seed" in texts(second[-1])
    assert "agent" in texts(second[-1])
    assert len(texts(model.bodies[0])) < 5000


async def test_t31_a_harness_that_waits_for_the_model_is_ended_and_scored(
    runner: LocalRunner, harness: str, write_task: TaskWriter, proxy_socket: Path
) -> None:
    """The proxy accepts and never answers, as while calls are held."""
    task = write_task("Wait.", "echo 0.5 > /logs/verifier/reward.txt")
    await runner.start(
        make_spec("e-0", task, harness, socket=proxy_socket, harness_s=2, evaluation_s=60, overall_s=180)
    )
    outcome = (await runner.wait("e-0")).outcome
    assert (outcome.validity, outcome.reward, outcome.cause) == (Validity.VALID, 0.5, "harness_timeout")
