"""Load-dependent executions against a step-by-step integration."""

import asyncio
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.control.base import Ticket
from gyre.simulation.clock import run_virtual
from gyre.simulation.loaded import LoadedExecutions
from gyre.simulation.workload import HOUR, GroupDraw, Workload, WorkloadParams, speed

PARAMS = WorkloadParams(
    harness_limit_h=3.0, overall_limit_h=4.0, evaluation_h=0.1, load_share=0.4, reference_load=10.0, work_node_h=0.5
)


def ticket(group: int) -> Ticket:
    return Ticket(execution_id=f"g{group}-0", group=group, member=0, query="q", version=0)


def test_graders_are_a_resource_that_executions_wait_for_in_order():
    params = msgspec.structs.replace(PARAMS, graders=1)
    terminated: list[float] = []

    async def main() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        executions = LoadedExecutions(params, lambda _: GroupDraw([1.0 * HOUR], [False], 1.0))
        executions.served_by(1.0)

        async def one(group: int) -> tuple[float, float]:
            outcome = await executions.run(ticket(group), lambda: terminated.append(loop.time() / HOUR))
            return loop.time() / HOUR, outcome.waited_s / HOUR

        return await asyncio.gather(*(one(group) for group in range(3)))

    ended = run_virtual(main())
    assert len(set(terminated)) == 1
    harness = terminated[0]
    assert ended == [(pytest.approx(harness + 0.1 * (n + 1)), pytest.approx(0.1 * n)) for n in range(3)]


def ends(hours: list[float], starts: list[float], nodes: float, unresolved: bool = False) -> list[tuple[float, str]]:
    """(end in hours, cause) of one execution per group."""

    async def main() -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        executions = LoadedExecutions(PARAMS, lambda group: GroupDraw([hours[group] * HOUR], [unresolved], 1.0))
        executions.served_by(nodes)

        async def one(group: int) -> tuple[float, str]:
            await asyncio.sleep(starts[group] * HOUR)
            outcome = await executions.run(ticket(group), lambda: None)
            return loop.time() / HOUR, outcome.cause

        return await asyncio.gather(*(one(group) for group in range(len(hours))))

    return run_virtual(main())


def test_speed_is_one_at_the_reference_load_and_bounded_without_load():
    assert speed(PARAMS, 10.0) == pytest.approx(1.0)
    assert speed(PARAMS, 0.0) == pytest.approx(1 / 0.6)
    assert speed(PARAMS, 20.0) < 1.0


def test_one_execution_alone():
    alone = 2.0 / speed(PARAMS, 1 / 4.0)
    assert ends([2.0], [0.0], nodes=4.0) == [(pytest.approx(alone + 0.1), "completed")]


def test_a_harness_at_its_limit_is_stopped_and_scored():
    assert ends([50.0], [1.0], nodes=1.0) == [(pytest.approx(1.0 + 3.0 + 0.1), "harness_timeout")]


def test_an_execution_without_a_valid_evaluation_ends_at_the_overall_limit():
    assert ends([1.0], [0.5], nodes=1.0, unresolved=True) == [(pytest.approx(4.5), "overall_timeout")]


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_shared_engines_against_small_time_steps(seed, count):
    rng = random.Random(seed)
    hours = [rng.uniform(0.1, 2.5) for _ in range(count)]
    starts = [rng.choice([0.0, rng.uniform(0.0, 2.0)]) for _ in range(count)]
    step, now = 0.0005, 0.0
    left, expected = dict(enumerate(hours)), {}
    while left:
        running = [group for group in left if starts[group] <= now]
        rate = speed(PARAMS, len(running) / 2.0)
        now += step
        for group in running:
            left[group] -= step * rate
            if left[group] <= 0 or now - starts[group] >= PARAMS.harness_limit_h:
                expected[group] = now + PARAMS.evaluation_h
                del left[group]
    measured = [end for end, _ in ends(hours, starts, nodes=2.0)]
    assert measured == pytest.approx([expected[group] for group in range(count)], abs=0.02)


def test_draws_depend_on_seed_and_group_only():
    one, other = Workload(PARAMS, 1, 16), Workload(PARAMS, 1, 16)
    assert one.draw(5) == other.draw(5)
    assert one.draw(5) != one.draw(6)
    assert one.draw(5) != Workload(PARAMS, 2, 16).draw(5)


def test_draws_have_the_correlation_and_the_shares_of_the_parameters():
    workload = Workload(WorkloadParams(sigma_query=0.4, sigma_execution=0.2, hard_query=0.2, hard_execution=0.1), 0, 16)
    draws = [workload.draw(group) for group in range(1500)]
    unresolved = sum(sum(draw.unresolved) for draw in draws) / (16 * len(draws))
    assert unresolved == pytest.approx(0.02, rel=0.2)
    assert sum(draw.work for draw in draws) / len(draws) == pytest.approx(workload.params.work_node_h * HOUR, rel=0.04)
