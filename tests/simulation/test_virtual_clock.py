import asyncio
import signal
import time

import pytest

from gyre.simulation.clock import HORIZON_S, VirtualClock, VirtualDeadlock, VirtualTimeExceeded, run_virtual


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


def test_timers_run_at_late_times_too_and_not_for_ever():
    """The clock resolution that asyncio adds to its time is lost in the rounding of late times."""

    async def main() -> list[float]:
        clock, seen = VirtualClock(), []
        for seconds in (2.0**24, 1.0, 0.0, 9e8, 0.1):
            await clock.sleep(seconds)
            seen.append(clock.now())
        return seen

    start = 2.0**24
    assert run_virtual(main()) == [start, start + 1, start + 1, start + 1 + 9e8, start + 1 + 9e8 + 0.1]

    async def late() -> None:
        await VirtualClock().sleep(HORIZON_S + 1.0)

    with pytest.raises(VirtualTimeExceeded, match="not over after 32 years"):
        run_virtual(late())


def test_timers_of_one_instant_run_in_the_order_in_which_they_were_set():
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_at(5.0, seen.append, number) for number in range(200)]
        for handle in handles[1::2]:
            handle.cancel()
        loop.call_at(1.0, loop.call_later, 4.0, seen.append, 1000)
        await VirtualClock().sleep(6.0)

    run_virtual(main())
    assert seen == [*range(0, 200, 2), 1000]


def test_a_callback_that_fails_is_reported_and_the_run_goes_on():
    async def main() -> list[BaseException]:
        loop, errors = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        loop.call_later(1.0, [].pop)
        await VirtualClock().sleep(2.0)
        return errors

    assert [type(error) for error in run_virtual(main())] == [IndexError]


def test_an_interrupt_ends_the_run():
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, signal.raise_signal, signal.SIGINT)
        await VirtualClock().sleep(1e6)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
