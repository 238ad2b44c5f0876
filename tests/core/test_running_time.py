"""Deadlines count the time in which the loop ran."""

import asyncio

import pytest

from gyre.core.running_time import GAP_S, RunningTimeLoop


class Machine:
    """A clock that jumps, as for a process that was stopped."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_deadline_that_passed_while_the_process_was_stopped_has_not_passed(machine: Machine) -> None:
    async def main() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(30.0):
            machine.now += 3600.0
            # The answer has come in the meantime, and is read after the timers had their turn.
            for _ in range(3):
                await asyncio.sleep(0)
            answer.set_result("well")
            return await answer

    with asyncio.Runner(loop_factory=lambda: RunningTimeLoop(machine)) as runner:
        assert runner.run(main()) == "well"


def test_a_deadline_passes_in_time_that_the_process_ran(machine: Machine) -> None:
    async def main() -> None:
        async with asyncio.timeout(30.0):
            while True:
                machine.now += GAP_S * 0.9
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: RunningTimeLoop(machine)) as runner, pytest.raises(TimeoutError):
        runner.run(main())


def test_an_idle_loop_sleeps_as_long_as_it_should() -> None:
    """On the real clock: nothing but the timer wakes it."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.sleep(0.05)
        return loop.time() - before

    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        assert runner.run(main()) >= 0.05
