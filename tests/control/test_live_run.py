"""How a live run ends."""

import asyncio

import pytest

from gyre.control.live.run import _first_of


@pytest.mark.parametrize("interrupts", [1, 2])
async def test_who_ends_hung_processes_is_there_until_the_run_has_ended(interrupts: int) -> None:
    """An interrupted run waits for its runner to cancel executions; a second interrupt does not wait for a watcher."""
    started, ending, runner_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    log = []

    async def main() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await runner_ended.wait()
            log.append("ended in order")

    async def watcher() -> None:
        await ending.wait()
        if interrupts == 1:
            runner_ended.set()
        await asyncio.Event().wait()

    run = asyncio.ensure_future(_first_of(main(), watcher()))
    await started.wait()
    run.cancel()
    if interrupts == 2:
        await ending.wait()
        run.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(20):
            await run
    assert log == ["ended in order"] * (interrupts == 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
