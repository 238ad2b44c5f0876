"""The paper's comparisons with Async and Colocate beyond NL2RepoBench with 122B: Table 2 and Figure 8 (§6.2).

Of these workloads the paper gives shapes (nodes, cells, concurrency, B, N, steps) and speed-ups; of Figure 8 also
hours and the shares of long queries; of Table 2 no duration at all. So their executions are modelled: the parameters
of NL2RepoBench, with what `Comparison.changes` says. docs/research/calibration.md has, for each number, whether it is
published, fitted or assumed. `VARIATIONS` change one assumption at a time: how far a ratio moves says how much of it
rests on that.
"""

import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec

from gyre.scheduling.config import ModeName, SchedulerConfig
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.workload import WorkloadParams


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Three modes on the same nodes and executions."""

    name: str
    cells: int
    cell_nodes: int
    capacity: int
    """Executions that one cell serves."""
    groups_per_step: int
    steps: int
    staleness: float
    paper: dict[str, float]
    """Published: `over_async`, `over_colocate`, and `hours` of Gyre where given."""
    changes: dict[str, float]
    """Of the parameters of NL2RepoBench."""
    training_nodes: float = 0.5
    """Share of the nodes that Async trains on; not published but for Table 1."""


_SHORT = {"median_h": 0.5, "sigma_query": 0.464, "sigma_execution": 0.426, "harness_limit_h": 2.0,
          "overall_limit_h": 2.25, "evaluation_h": 0.02}  # fmt: skip
DEEPSWE = _SHORT | {"work_node_h": 0.09}
TERMINAL = _SHORT | {"work_node_h": 0.06}
LARGE = {"median_h": 0.65, "sigma_query": 0.8, "sigma_execution": 0.8, "harness_limit_h": 4.0, "overall_limit_h": 4.45,
         "hard_query": 0.6, "hard_execution": 0.06, "work_node_h": 2.5, "replica_nodes": 48}  # fmt: skip


def _table2(name: str, staleness: float, over_async: float, over_colocate: float) -> Comparison:
    return Comparison(
        name=f"{name}, E[d] = {staleness:g}",
        cells=6,
        cell_nodes=4,
        capacity=192,
        groups_per_step=48,
        steps=24,
        staleness=staleness,
        paper={"over_async": over_async, "over_colocate": over_colocate},
        changes=DEEPSWE if name == "DeepSWE" else TERMINAL,
    )


TABLE2 = [
    _table2("DeepSWE", 1.0, 1.569, 1.610),
    _table2("DeepSWE", 1.5, 1.572, 1.824),
    _table2("TerminalBench", 1.0, 1.383, 1.809),
    _table2("TerminalBench", 1.5, 1.430, 1.849),
]
FIGURE8 = [
    Comparison(
        name="NL2RepoBench, 2.4T",
        cells=4,
        cell_nodes=48,
        capacity=96,
        groups_per_step=32,
        steps=48,
        staleness=1.5,
        paper={"over_async": 1.784, "over_colocate": 1.213, "hours": 75.42},
        changes=LARGE,
    )
]

VARIATIONS: dict[str, dict[str, float]] = {
    "training work × 0.5": {"work_node_h": 0.5},
    "training work × 2": {"work_node_h": 2.0},
    "spread of durations × 0.7": {"sigma_query": 0.7, "sigma_execution": 0.7},
    "spread of durations × 1.4": {"sigma_query": 1.4, "sigma_execution": 1.4},
    "harness limit × 0.8": {"harness_limit_h": 0.8},
    "harness limit × 1.25": {"harness_limit_h": 1.25},
    "no imbalance inside large cells": {"imbalance": 0.0},
    "duration does not depend on load": {"load_share": 0.0},
    "Async trains on a third of the nodes": {"training_nodes": 2 / 3},
}
"""Factors."""


class Job(msgspec.Struct, frozen=True):
    comparison: Comparison
    method: str
    seed: int


def with_factors(comparison: Comparison, factors: Mapping[str, float]) -> Comparison:
    """The comparison with some parameters, or the nodes of Async's trainer, multiplied."""
    base = msgspec.structs.asdict(WorkloadParams()) | comparison.changes
    changes = comparison.changes | {name: base[name] * factor for name, factor in factors.items() if name in base}
    share = comparison.training_nodes * factors.get("training_nodes", 1.0)
    return msgspec.structs.replace(comparison, changes=changes, training_nodes=share)


def arrangement(comparison: Comparison, method: str) -> tuple[SchedulerConfig, Layout]:
    """The paper's settings of a method at this staleness (§6.1) and the nodes behind them."""
    mean, nodes = comparison.staleness, comparison.cells * comparison.cell_nodes
    node_capacity = comparison.capacity / comparison.cell_nodes
    mode: ModeName
    if method == "gyre":
        mode, cells, size, pool, point = "elastic", comparison.cells, comparison.cell_nodes, 0, (0.5, 2 * mean)
    elif method == "async":
        training = round(nodes * comparison.training_nodes)
        mode, cells, size, pool, point = "async", 1, training, nodes - training, (mean, 1)
    else:
        mode, cells, size, pool, point = "colocate", 1, nodes, 0, (0.0, 2 * mean + 1)
    config = SchedulerConfig(
        mode=mode,
        groups_per_step=comparison.groups_per_step,
        executions_per_group=16,
        steps_per_burst=round(point[1]),
        extra_dispatch=point[0],
        cells=cells,
        cell_capacity=round(size * node_capacity),
        pool_capacity=round(pool * node_capacity),
        streaming=method == "gyre",
        max_steps=comparison.steps,
    )
    return config, Layout(cell_nodes=size, pool_nodes=pool)


def measure(job: Job) -> dict[str, float]:
    """Hours of the run, and what the executions were like."""
    comparison = job.comparison
    config, layout = arrangement(comparison, job.method)
    load = comparison.capacity / comparison.cell_nodes
    params = msgspec.structs.replace(WorkloadParams(), **{"reference_load": load} | comparison.changes)
    stats = simulate(config, layout, params, seed=job.seed)
    return {
        "hours": stats.step_ends[-1],
        "long_queries": stats.long_groups / stats.groups,
        "lost_queries": stats.lost_groups / stats.groups,
        "execution_hours": stats.execution_hours / stats.executions,
    }


METHODS = ("gyre", "async", "colocate")


def compare(comparisons: list[Comparison], seeds: int) -> dict[str, dict[str, Any]]:
    """{name: {"over_async", "over_colocate", "hours", "standard_error", "paper", statistics of Gyre's executions}}."""
    jobs = [Job(one, method, seed) for one in comparisons for method in METHODS for seed in range(seeds)]
    with ProcessPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1)) as pool:
        measured = iter(list(pool.map(measure, jobs)))
    found: dict[str, dict[str, Any]] = {}
    for one in comparisons:
        # In the order of `jobs`.
        runs = {method: [next(measured) for _ in range(seeds)] for method in METHODS}
        hours = {method: [run["hours"] for run in runs[method]] for method in METHODS}
        entry: dict[str, Any] = {
            "paper": one.paper,
            "hours": {method: statistics.mean(values) for method, values in hours.items()},
        }
        for method in ("async", "colocate"):
            ratios = [base / own for base, own in zip(hours[method], hours["gyre"], strict=True)]
            entry[f"over_{method}"] = statistics.mean(ratios)
            entry[f"over_{method}_sd"] = statistics.stdev(ratios) if seeds > 1 else 0.0
        for key in ("long_queries", "lost_queries", "execution_hours"):
            entry[key] = statistics.mean(run[key] for run in runs["gyre"])
        found[one.name] = entry
    return found


def sensitivity(comparisons: list[Comparison], seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    """{variation: {name: {"over_async", "over_colocate"}}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for variation, factors in VARIATIONS.items():
        entries = compare([with_factors(one, factors) for one in comparisons], seeds)
        found[variation] = {
            name: {key: entry[key] for key in ("over_async", "over_colocate")} for name, entry in entries.items()
        }
    return found
