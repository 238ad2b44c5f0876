"""Fits the workload model to what the paper publishes: `python -m gyre.simulation.paper.calibrate`.

Fixed from the paper: B, N, cells, 144 executions per four nodes, switch times, and the two overall-timeout numbers,
which determine how unresolved executions cluster in queries. Fitted: the parameters of `START`, so that the sum of
squared `residuals` is least over the eleven totals of Table 1, the ratio C2/E0 and four statistics of §6.2. The 48-step
speed-ups are unused. `--without E0 E1 E2` leaves rows out, and with E0 the ratio.

The search is scipy's `least_squares` from `START`, deterministic, with the finite differences of `STEPS`; every point
has three digits. Points are compared on few seeds; what these differ by from many seeds is measured once, at `START`,
and divided out. `calibration.json` beside this file is the outcome: the defaults of `WorkloadParams` are its
parameters (docs/research/calibration.md).
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from gyre.simulation.paper.rows import ROWS, TableRow, run_row
from gyre.simulation.paper.table1 import Job
from gyre.simulation.stats import RunStats
from gyre.simulation.workload import WorkloadParams

RECORD = Path(__file__).with_name("calibration.json")

START = {
    "median_h": 1.77,
    "growth": 0.25,
    "sigma_query": 0.36,
    "sigma_execution": 0.327,
    "harness_limit_h": 3.45,
    "evaluation_h": 0.05,
    "load_share": 0.53,
    "work_node_h": 0.392,
    "imbalance": 0.28,
    "update_s": 40.0,
}
"""Where the search begins: an earlier, hand-guided fit."""

STEPS = {
    "median_h": 0.03,
    "growth": 0.05,
    "sigma_query": 0.02,
    "sigma_execution": 0.02,
    "harness_limit_h": 0.1,
    "evaluation_h": 0.05,
    "load_share": 0.05,
    "work_node_h": 0.02,
    "imbalance": 0.05,
    "update_s": 30.0,
}
"""Finite-difference step of each; the search counts in them."""

BOUNDS = {"load_share": (0.0, 0.9), "update_s": (0.0, 300.0), "imbalance": (0.0, 1.0), "evaluation_h": (0.0, 0.5)}

STATISTICS = {
    "mean_h": (1.93, 0.01),
    "query_max_h": (2.96, 0.015),
    "queries_4h": (0.0951, 0.01),
    "timeouts": (0.0625, 0.004),
}
"""Published value, and the difference that counts as much as `ROW_TOLERANCE` of a row's hours."""

ROW_TOLERANCE = 0.02
OVERALL_TIMEOUTS = 0.0087
QUERIES_WITH_OVERALL_TIMEOUT = 0.0951
"""An overall timeout is the only way past four hours, so these are the queries of at least four hours."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of the script found."""

    params: WorkloadParams
    rows: list[str]
    """Whose hours were fitted."""
    seeds: list[int]
    """The seeds that points were compared on."""
    reference_seeds: int
    objective: float
    measured: dict[str, float]
    """On `seeds`, uncorrected: hours of the rows and statistics of E0."""
    corrected: dict[str, float]


def hard_queries(members: int = 16) -> tuple[float, float]:
    """(share of hard queries π, probability per execution q) such that π·q and π·(1−(1−q)^N) are as published."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if (1 - (1 - middle) ** members) / middle > QUERIES_WITH_OVERALL_TIMEOUT / OVERALL_TIMEOUTS:
            low = middle
        else:
            high = middle
    return OVERALL_TIMEOUTS / low, low


def statistics(stats: RunStats) -> dict[str, float]:
    return {
        "mean_h": stats.execution_hours / stats.executions,
        "query_max_h": stats.group_hours / stats.groups,
        "queries_4h": stats.long_groups / stats.groups,
        "timeouts": stats.causes.get("harness_timeout", 0) / stats.executions,
        "overall": stats.causes.get("overall_timeout", 0) / stats.executions,
    }


def measure(params: WorkloadParams, seeds: Sequence[int], rows: Sequence[TableRow]) -> dict[str, float]:
    """Means over the seeds: hours of each row after 12 steps, and the statistics of E0 over 48. Uses every CPU."""
    jobs = [Job(row, params, seed, 48 if row.name == "E0" else 12) for seed in seeds for row in rows]
    if all(row.name != "E0" for row in rows):
        jobs += [Job(ROWS["E0"], params, seed, 48) for seed in seeds]
    sums: dict[str, list[float]] = {}
    with ProcessPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1)) as pool:
        for values in pool.map(_measured, jobs):
            for key, value in values.items():
                sums.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in sums.items()}


def _measured(job: Job) -> dict[str, float]:
    stats = run_row(job.row, job.params, seed=job.seed, steps=job.steps)
    return {job.row.name: stats.step_ends[11]} | (statistics(stats) if job.row.name == "E0" else {})


def residuals(measured: Mapping[str, float], rows: Sequence[TableRow]) -> NDArray[np.float64]:
    """Each in units of `ROW_TOLERANCE` of a row's hours."""
    names = [row.name for row in rows]
    found = [(measured[row.name] / row.hours - 1) / ROW_TOLERANCE for row in rows]
    if "C2" in names and "E0" in names:
        ratio = (measured["C2"] / measured["E0"]) / (ROWS["C2"].hours / ROWS["E0"].hours) - 1
        found.append(ratio / ROW_TOLERANCE)
    return np.array([*found, *((measured[key] - value) / scale for key, (value, scale) in STATISTICS.items())])


def objective(measured: Mapping[str, float], rows: Sequence[TableRow]) -> float:
    """Sum of squared residuals."""
    found = residuals(measured, rows)
    return float(found @ found)


def fit(
    seeds: range,
    reference: range,
    tries: int,
    report: Callable[[str], None],
    begin: Mapping[str, float] = START,
    rows: Sequence[TableRow] = tuple(ROWS.values()),
) -> Record:
    """At most `tries` steps. Raises KeyError for a parameter that `STEPS` does not know."""
    share, probability = hard_queries()
    fixed = msgspec.structs.replace(WorkloadParams(), hard_query=round(share, 4), hard_execution=round(probability, 4))
    steps = np.array([STEPS[name] for name in begin])
    lower, upper = np.transpose([BOUNDS.get(name, (1e-3, 1e3)) for name in begin])

    def params(point: NDArray[np.float64]) -> WorkloadParams:
        values = {name: float(f"{value:.3g}") for name, value in zip(begin, point * steps, strict=True)}
        return msgspec.structs.replace(fixed, **values)

    start = np.array(list(begin.values())) / steps
    few, many = measure(params(start), seeds, rows), measure(params(start), reference, rows)
    correction = {key: many[key] / few[key] for key in few}

    def at(point: NDArray[np.float64]) -> NDArray[np.float64]:
        measured = measure(params(point), seeds, rows)
        found = residuals({key: value * correction[key] for key, value in measured.items()}, rows)
        report(f"objective {found @ found:.2f}: {params(point)}")
        return found

    found = least_squares(
        at, start, bounds=(lower / steps, upper / steps), diff_step=1 / np.abs(start), max_nfev=tries + 1
    )
    measured = measure(params(found.x), seeds, rows)
    corrected = {key: value * correction[key] for key, value in measured.items()}
    return Record(
        params=params(found.x),
        rows=[row.name for row in rows],
        seeds=list(seeds),
        reference_seeds=len(reference),
        objective=objective(corrected, rows),
        measured=measured,
        corrected=corrected,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--first-seed", type=int, default=1000, help="not a seed that Table 1 is printed with")
    parser.add_argument("--seeds", type=int, default=1, help="on which points are compared")
    parser.add_argument("--reference-seeds", type=int, default=8, help="that the few seeds are corrected to")
    parser.add_argument("--tries", type=int, default=3, help="steps, each with finite differences of its own")
    parser.add_argument("--without", nargs="*", default=[], metavar="ROW", help="rows that are not fitted")
    parser.add_argument("--json", type=Path, default=RECORD)
    arguments = parser.parse_args()
    first = arguments.first_seed
    rows = [row for row in ROWS.values() if row.name not in arguments.without]
    record = fit(
        range(first, first + arguments.seeds),
        range(first, first + arguments.reference_seeds),
        arguments.tries,
        lambda line: print(line, file=sys.stderr, flush=True),
        rows=rows,
    )
    for row in rows:
        hours = record.corrected[row.name]
        print(f"{row.name}  {hours:6.2f} h  paper {row.hours:6.2f}  {hours / row.hours - 1:+.1%}")
    for key, (value, _) in STATISTICS.items():
        print(f"{key}  {record.corrected[key]:.4f}  paper {value}")
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


if __name__ == "__main__":
    main()
