"""Beyond the paper at the same mean staleness: launch order with a predictor, the work bound, verl's dynamic rule."""

import math
import random

import msgspec

from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.order import Fifo, LaunchOrder, LongestFirst
from gyre.scheduling.policies import Decision
from gyre.scheduling.rules import Situation, waterlevel_allows
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.rows import ROWS, Row
from gyre.simulation.workload import HOUR, Workload, WorkloadParams


def predicted_order(params: WorkloadParams, seed: int, members: int, log_error: float | None) -> LaunchOrder:
    """longest_first by the slowest execution of a group times exp(log_error·z); None is fifo, 0 an oracle."""
    if log_error is None:
        return Fifo()
    workload = Workload(params, seed, members)

    def predict(query: str) -> float:
        noise = random.Random(f"{seed}/{query}").gauss(0.0, 1.0)
        return max(workload.draw(int(query.removeprefix("q"))).harness_s) * math.exp(log_error * noise)

    return _Frozen(predict)


class _Frozen(LongestFirst):
    """Only the prediction under test: nothing is learnt."""

    def observe(self, query: str, seconds: float) -> None:
        """Ignores the run."""


def order_hours(params: WorkloadParams, seeds: int, log_error: float | None, steps: int = 12) -> list[float]:
    """Hours of E0, per seed."""
    row = ROWS["E0"]
    config, layout = row.config(steps=steps), Layout(cell_nodes=row.nodes, pool_nodes=row.pool_nodes)
    return [
        simulate(config, layout, params, seed=seed, order=predicted_order(params, seed, config.N, log_error)).step_ends[
            -1
        ]
        for seed in range(seeds)
    ]


def work_bound(params: WorkloadParams, row: Row, seed: int, steps: int = 12) -> float:
    """Hours in which all nodes, never idle and always at the reference load, could do the work of the trained groups.

    An execution holds its slot from launch to close; the trained groups are taken to be the first steps·B.
    """
    config = row.config(steps=steps)
    workload = Workload(params, seed, config.N)
    slot_seconds = work = 0.0
    for group in range(steps * config.B):
        draw = workload.draw(group)
        work += draw.work
        for harness, unresolved in zip(draw.harness_s, draw.unresolved, strict=True):
            scored = min(harness, params.harness_limit_h * HOUR) + params.evaluation_h * HOUR
            slot_seconds += params.overall_limit_h * HOUR if unresolved else scored
    nodes = row.cells * row.nodes + row.pool_nodes
    return (slot_seconds / params.reference_load + work) / nodes / HOUR


class VerlDynamic:
    """The default rule of verl's `dynamic_schedule` (fully asynchronous trainer, 2026), on one cell and a pool.

    The trainer's nodes serve until `ratio`·μB groups are ready, then train until the publication; after it they serve
    again unless as many are ready already. `ratio` rises by the share of groups that the trainer had to wait for
    (between 0.02 and 0.1) and falls by 0.02 when it waited for none. Two things differ: nodes leave only when the pool
    can carry what is outstanding, since here no execution may be hurt; and the cost gate is left out, since a switch
    costs seconds.
    """

    releases = True

    def __init__(self, config: SchedulerConfig, ratio: float = 0.3) -> None:
        self._config = config
        self._ratio = ratio
        self._waited = 0

    def decide(self, situation: Situation) -> Decision:
        config = self._config
        required = config.mu * config.B
        if situation.boundary:
            step = min(0.1, max(0.02, self._waited / required)) if self._waited else -0.02
            self._ratio = min(1.0, self._ratio + step)
            stays = situation.ready >= self._ratio * required
            self._waited = max(0, config.B - situation.ready) if stays else 0
            return Decision(int(stays))
        if situation.training or situation.ready < int(self._ratio * required):
            return Decision(situation.training)
        if not waterlevel_allows(config, situation.waterlevel, 0):
            return Decision(0)
        self._waited = max(0, config.B - situation.ready)
        return Decision(1)


VERL_ROWS = (
    msgspec.structs.replace(ROWS["C3"], name="verl 16+16", streaming=False, phi=1.5, mu=1),
    msgspec.structs.replace(ROWS["C3"], name="verl 8+24", streaming=False, phi=1.5, mu=1, nodes=8, pool_nodes=24),
)


def verl_hours(params: WorkloadParams, row: Row, seeds: int, steps: int = 12) -> list[float]:
    """Hours of a row under verl's rule, per seed."""
    config, layout = row.config(steps=steps), Layout(cell_nodes=row.nodes, pool_nodes=row.pool_nodes)
    return [
        simulate(config, layout, params, seed=seed, policy=VerlDynamic(config)).step_ends[-1] for seed in range(seeds)
    ]
