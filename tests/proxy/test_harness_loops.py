"""Every harness, unmodified: a tool loop with parallel calls, refused and cut requests, an interrupted run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harness_runs import EVERY, OPENCODE, Faults, Hold, Rules, chain, harness, installed, leaves, proxy_for, run, shell
from proxy_fakes import until

pytestmark = pytest.mark.harness

STREAMING = [name for name in EVERY if name not in ("qwen_code", "mini_swe_agent")]
"""Harnesses that ask again for a stream that was cut."""


def steps(name: str) -> Rules:
    """Three turns: one call, two calls at once, the end. Outputs differ from the commands, which some tools echo."""
    end = shell(name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if name == "mini_swe_agent" else ""
    two = (
        "Now both of them at once.\n"
        + shell(name, "printf 'two%s' -ok > two.txt; cat two.txt")
        + "\n"
        + shell(name, "echo three")
    )
    return {
        "two-ok": "All is done.\n" + end,
        "one-ok": two,
        "Do the steps.": "<think>\nA plan.\n</think>\n\nFirst.\n" + shell(name, "printf 'one%s' -ok"),
        "": "Nothing to add.",
    }


@pytest.mark.parametrize("name", EVERY)
async def test_tool_loop_through_refusals_is_one_exact_path(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    faults = Faults(errors={2: 429, 4: 503})
    app = await run(proxy_tokenizer, installed(name), tmp_path, steps(name), wrap=faults.around)
    assert (tmp_path / "workspace" / "two.txt").read_text() == "two-ok"
    chain(app, [record for record in app.sink.records if record.role != "auxiliary"])
    assert leaves(app) == {"main": 1}
    assert len(app.engines[0].requests) == len(app.sink.records)


@pytest.mark.parametrize("name", STREAMING)
async def test_cut_stream_is_sampled_anew_and_leaves_an_orphan(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    hold = Hold(2)
    faults = Faults(cuts={2 if name not in OPENCODE else 3: hold.reached})
    app = await run(proxy_tokenizer, installed(name), tmp_path, steps(name), hold=hold, wrap=faults.around)
    assert (tmp_path / "workspace" / "two.txt").read_text() == "two-ok"
    orphans = [record for record in app.sink.records if "orphan" in record.flags]
    assert [(record.trainable, len(record.output_ids)) for record in orphans] == [(False, 20)]
    chain(app, [record for record in app.sink.records if "orphan" not in record.flags])
    assert leaves(app) == {"main": 1}


@pytest.mark.parametrize("name", STREAMING)
async def test_answer_lost_on_the_way_is_replayed_not_sampled_again(
    proxy_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    recorded = asyncio.Event()
    title = int(name in OPENCODE)
    profile, faults = installed(name), Faults(cuts={2 + title: recorded})
    async with (
        proxy_for(proxy_tokenizer, profile, steps(name), wrap=faults.around) as app,
        harness(profile, app, tmp_path, "Do the steps.") as running,
    ):
        app.sink.on_put = lambda: recorded.set() if len(app.sink.records) == 2 else None
        code, output = await running.end()
        assert code == 0, output[-3000:]
        assert app.session().counts["replayed"] == 1
    assert faults.requests == 4 + title
    assert len(app.sink.records) == 3
    chain(app, app.sink.records)
    assert leaves(app) == {"main": 1}


@pytest.mark.parametrize("whole", [False, True])
async def test_qwen_ends_its_run_at_a_cut_stream(proxy_tokenizer: Any, tmp_path: Path, whole: bool) -> None:
    """Whether the answer was sampled to its end or not; only then it may train."""
    hold, recorded = Hold(2), asyncio.Event()
    profile, faults = installed("qwen_code"), Faults(cuts={2: recorded if whole else hold.reached})
    async with (
        proxy_for(proxy_tokenizer, profile, steps("qwen_code"), wrap=faults.around) as app,
        harness(profile, app, tmp_path, "Do the steps.") as running,
    ):
        if not whole:
            hold.on(app.engines[0])
        app.sink.on_put = lambda: recorded.set() if len(app.sink.records) == 2 else None
        code, _ = await running.end()
    assert (code, faults.requests) == (0, 2)
    assert [record.trainable for record in app.sink.records] == [True, whole]
    assert ["orphan" in record.flags for record in app.sink.records] == [False, not whole]
    assert leaves(app) == {"main": 1}


@pytest.mark.parametrize("name", EVERY)
async def test_interrupt_leaves_an_orphan(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    profile, hold = installed(name), Hold(2)
    async with proxy_for(proxy_tokenizer, profile, steps(name)) as app:
        hold.on(app.engines[0])
        async with harness(profile, app, tmp_path, "Do the steps.") as running:
            await hold.reached.wait()
            running.interrupt()
            await running.end()
            await until(lambda: len(app.sink.records) == 2)
    assert [(str(record.role), record.trainable) for record in app.sink.records] == [("main", True), ("main", False)]
    assert leaves(app) == {"main": 1}
