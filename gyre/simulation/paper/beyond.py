"""Beyond the paper at the same mean staleness: E0 with `longest_first` and predictions of any quality; work bound."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.paper.rows import ROWS, TableRow
from gyre.simulation.predictions import predicted_order
from gyre.simulation.workload import HOUR, Workload, WorkloadParams


def order_hours(
    params: WorkloadParams, seeds: Sequence[int], log_error: float | None, *, lightest_first: bool, steps: int = 12
) -> list[float]:
    """Hours of E0, per seed. `longest_first` launches by prediction and trains the lightest of a version first; here
    each half can be had alone, to see what it is worth."""
    row = ROWS["E0"]
    launch_order: Literal["fifo", "longest_first"] = "longest_first" if lightest_first else "fifo"
    config = msgspec.structs.replace(row.config(steps=steps), launch_order=launch_order)
    layout = Layout(cell_nodes=row.nodes, pool_nodes=row.pool_nodes)
    return [
        simulate(
            config,
            layout,
            params,
            seed=seed,
            order=predicted_order(params, seed, config.executions_per_group, log_error),
        ).step_ends[-1]
        for seed in seeds
    ]


def paired_gain(hours: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Mean relative difference over the seeds, and its standard error; the same seeds in the same order."""
    gains = [own / other - 1 for own, other in zip(hours, base, strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return statistics.mean(gains), error


def work_bound(params: WorkloadParams, row: TableRow, seed: int, steps: int = 12) -> float:
    """Hours in which all nodes, never idle and always at the reference load, could do the work of the trained groups.

    An execution holds its slot from launch to close; the trained groups are taken to be the first steps·B.
    """
    config = row.config(steps=steps)
    workload = Workload(params, seed, config.executions_per_group)
    slot_seconds = work = 0.0
    for group in range(steps * config.groups_per_step):
        draw = workload.draw(group)
        work += draw.work
        for harness, unresolved in zip(draw.harness_s, draw.unresolved, strict=True):
            scored = min(harness, params.harness_limit_h * HOUR) + params.evaluation_h * HOUR
            slot_seconds += params.overall_limit_h * HOUR if unresolved else scored
    nodes = row.cells * row.nodes + row.pool_nodes
    return (slot_seconds / params.reference_load + work) / nodes / HOUR
