import asyncio
import time

import pytest

from gyre.simulation.clock import VirtualClock, VirtualDeadlock, run_virtual


def test_time_jumps_to_the_next_timer_in_order():
    seen = []

    async def sleeper(name: str, seconds: float) -> None:
        await VirtualClock().sleep(seconds)
        seen.append((name, VirtualClock().now()))

    async def main() -> None:
        await asyncio.gather(sleeper("week", 7 * 86400.0), sleeper("day", 86400.0), sleeper("now", 0.0))

    before = time.monotonic()
    run_virtual(main())
    assert seen == [("now", 0.0), ("day", 86400.0), ("week", 7 * 86400.0)]
    assert time.monotonic() - before < 1


def test_waiting_for_nothing_raises_instead_of_hanging():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(VirtualDeadlock, match="no timer is left"):
        run_virtual(main())


def test_the_result_and_errors_of_the_program_come_through():
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ValueError("mine")

    assert run_virtual(answer()) == 42
    with pytest.raises(ValueError, match="mine"):
        run_virtual(fail())
