"""Every harness waits for a call that is silent for long (docs/harnesses.md). Opt-in: `make patience` sets how long.

Silent are a call that is held while no engine admits, and a call inside which the policy writes one long tool call, of
which nothing goes out before it is recorded. Only keep-alives go out meanwhile.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from harness_runs import EVERY, chain, harness, installed, proxy_for, shell
from proxy_fakes import ScriptedEngine

from gyre.core.records import CallRecord

SECONDS = float(os.environ.get("GYRE_PATIENCE_S", "0"))

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not SECONDS, reason="opt-in: GYRE_PATIENCE_S says how many seconds a call is silent"),
]


class Silence:
    """Keeps an engine from going on inside its second answer, for a time."""

    def __init__(self, engine: ScriptedEngine, seconds: float) -> None:
        self.kept = 0

        async def step(done: int) -> None:
            if len(engine.requests) == 2 and done >= 40 and not self.kept:
                self.kept += 1
                await asyncio.sleep(seconds)

        engine.step = step


@pytest.mark.parametrize("name", EVERY)
async def test_a_silent_call_is_waited_for(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    profile = installed(name)
    last = "Done.\n" + shell(name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if name.startswith("mini") else "Done."
    rules = {
        "two-ok": last,
        "one-ok": "I write it now.\n" + shell(name, "printf 'two%s' -ok"),
        "Do the steps.": shell(name, "printf 'one%s' -ok"),
    }
    async with proxy_for(proxy_tokenizer, profile, rules, keepalive_s=10.0, stall_s=1e9, hold_s=1e9) as app:
        app.router.set_routes([])
        silence = Silence(app.engines[0], SECONDS)
        async with harness(profile, app, tmp_path, "Do the steps.", seconds=2 * SECONDS + 300) as running:
            async with asyncio.timeout(240):
                await _held(app)
            await asyncio.sleep(SECONDS)
            assert app.router.held == 1
            app.router.set_routes([app.route(0)])
            code, output = await running.end()
        assert code == 0, output[-2000:]
        assert silence.kept == 1
        records: list[CallRecord] = app.sink.records
        assert len(records) == len(app.engines[0].requests) == 3, "a call was asked for again"
        chain(app, records)
        assert (app.session().counts["attached"], app.session().counts["orphans"]) == (0, 0)


async def _held(app: Any) -> None:
    while not app.router.held:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
