"""The paper's two scheduling experiments on the modelled workload: Table 1, and the 48-step speedups (§6.2, §6.3)."""

import os
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec

from gyre.simulation.paper.rows import ROWS, TableRow, run_row
from gyre.simulation.workload import WorkloadParams


class Job(msgspec.Struct, frozen=True):
    row: TableRow
    params: WorkloadParams
    seed: int
    steps: int


class Result(msgspec.Struct, frozen=True):
    hours: float
    """End of the last update."""
    idle: float
    """Share of the training role in which no micro-step was processed."""


def run(job: Job) -> Result:
    stats = run_row(job.row, job.params, seed=job.seed, steps=job.steps)
    return Result(stats.step_ends[-1], 1 - stats.busy_hours / stats.training_hours)


def results(
    rows: Sequence[TableRow], params: WorkloadParams, seeds: Iterable[int], steps: int
) -> dict[str, list[Result]]:
    """By row, of each seed; rows of one seed meet the same executions. Uses every CPU."""
    jobs = [Job(row, params, seed, steps) for seed in seeds for row in rows]
    with ProcessPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1)) as pool:
        measured = list(pool.map(run, jobs))
    found: dict[str, list[Result]] = {row.name: [] for row in rows}
    for job, value in zip(jobs, measured, strict=True):
        found[job.row.name].append(value)
    return found


def table1(params: WorkloadParams, seeds: int, steps: int = 12) -> dict[str, Any]:
    """{"rows": {name: {"hours", "sd", "paper", "ratio_to_E0", "idle"}}, "params": …}; `sd` is over seeds, `idle` of the
    training role."""
    measured = results(list(ROWS.values()), params, range(seeds), steps)
    base = statistics.mean(one.hours for one in measured["E0"])
    return {
        "rows": {name: _entry(ROWS[name], values, base) for name, values in measured.items()},
        "params": msgspec.to_builtins(params) | {"seeds": seeds},
    }


def _entry(row: TableRow, values: Sequence[Result], base: float) -> dict[str, float]:
    hours = [one.hours for one in values]
    return {
        "hours": statistics.mean(hours),
        "sd": statistics.stdev(hours) if len(hours) > 1 else 0.0,
        "paper": row.hours,
        "ratio_to_E0": statistics.mean(hours) / base,
        "idle": statistics.mean(one.idle for one in values),
    }


SPEEDUPS: dict[float, dict[str, TableRow]] = {
    1.0: {
        "gyre": msgspec.structs.replace(ROWS["E0"], name="gyre", extra_dispatch=0.5, steps_per_burst=2),
        "async": msgspec.structs.replace(ROWS["A0"], name="async", extra_dispatch=1.0, steps_per_burst=1),
        "colocate": msgspec.structs.replace(ROWS["C0"], name="colocate", extra_dispatch=0.0, steps_per_burst=3),
    },
    1.5: {
        "gyre": msgspec.structs.replace(ROWS["E0"], name="gyre"),
        "async": msgspec.structs.replace(ROWS["A0"], name="async"),
        "colocate": msgspec.structs.replace(ROWS["C0"], name="colocate"),
    },
}
"""The three methods at each target of mean staleness (§6.1)."""


def speedups(params: WorkloadParams, seeds: int, steps: int = 48) -> dict[str, Any]:
    """{"E[d]": {"hours": {method: mean}, "over_async": …, "over_colocate": …}} after `steps` steps."""
    result: dict[str, Any] = {}
    for target, rows in SPEEDUPS.items():
        measured = {
            name: statistics.mean(one.hours for one in values)
            for name, values in results(list(rows.values()), params, range(seeds), steps).items()
        }
        result[str(target)] = {
            "hours": measured,
            "over_async": measured["async"] / measured["gyre"],
            "over_colocate": measured["colocate"] / measured["gyre"],
        }
    return result
