"""`gyre simulate trace`: a fixed workload without randomness, replayed under the rules of docs/scheduling.md."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gyre.control.base import Environment, Ticket
from gyre.control.controller import Controller
from gyre.core.config import Positive
from gyre.core.errors import ConfigError
from gyre.scheduling.config import SchedulerConfig, require
from gyre.simulation.clock import VirtualClock, run_virtual
from gyre.simulation.executions import FixedExecutions, Graders
from gyre.simulation.paper.rows import EXECUTIONS_PER_NODE, TableRow
from gyre.simulation.stats import RunStats
from gyre.simulation.synthetic import CellTimes, MemoryJournal, SimCells, SimMaterializer, equal_parts
from gyre.simulation.workload import HOUR

Seconds = Annotated[float, Meta(ge=0)]
MAX_HOURS = 1e6
"""Beyond it a float of seconds is too coarse for what happens within one."""


class TraceParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides; None keeps what the row says."""

    groups_per_step: int = 32
    extra_dispatch: float | None = None
    steps_per_burst: int | None = None
    streaming: bool | None = None
    dispatch: Literal["boundary", "continuous"] = "boundary"
    min_supply: float = 0.125
    supply_wait_s: float = 60.0
    publication_s: Seconds = 60.0
    to_training_s: Seconds = 8.52
    to_rollout_s: Seconds = 3.46
    executions_per_node: float = EXECUTIONS_PER_NODE
    cells: int | None = None
    nodes_per_cell: Positive | None = None
    pool_nodes: int | None = None
    micro_steps: Positive = 4
    grading_s: Seconds = 0.0
    """Of a grader, after every execution."""
    graders: Positive | None = None
    """Gradings at a time; None: no execution waits for one."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dur: list[list[float]]
    """Hours of each execution, [groups in dispatch order][N]."""
    work: list[float]
    """Node-hours of training of each group."""
    params: TraceParams = TraceParams()


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    step_end_hours: list[float]
    """End of each step's update."""
    burst_end_hours: list[float]
    """End of each publication."""
    joins: list[tuple[int, float]]
    """(cell, hours) whenever a cell has moved from rollout into training."""
    staleness_per_step: list[list[int]]
    """Of the groups in the order in which the batch took them."""


def load_trace(path: Path) -> Trace:
    """Raises ConfigError naming the file and what is wrong in it."""
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=Trace)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}.") from error
    if not trace.dur or not trace.dur[0]:
        raise ConfigError(f"{path}: dur is empty; it needs one list of N hours per group.")
    members = len(trace.dur[0])
    for group, hours in enumerate(trace.dur):
        if len(hours) != members:
            raise ConfigError(f"{path}: dur[{group}] has {len(hours)} executions, dur[0] has {members}.")
        if not all(0 <= value <= MAX_HOURS for value in hours):
            raise ConfigError(
                f"{path}: dur[{group}] holds a value that is not a duration from 0 to {MAX_HOURS:g} hours."
            )
    if len(trace.work) != len(trace.dur):
        raise ConfigError(f"{path}: work has {len(trace.work)} entries for {len(trace.dur)} groups of dur.")
    if not all(0 <= value <= MAX_HOURS for value in trace.work):
        raise ConfigError(f"{path}: work holds a value that is not from 0 to {MAX_HOURS:g} node-hours.")
    if trace.params.dispatch == "continuous" and not any(map(any, trace.dur)):
        raise ConfigError(f"{path}: dur is 0 everywhere; with continuous dispatch groups follow without end.")
    return trace


def trace_row(trace: Trace, row: TableRow) -> TableRow:
    """The row with the file's overrides."""
    params = trace.params
    changes = {
        "extra_dispatch": params.extra_dispatch,
        "steps_per_burst": params.steps_per_burst,
        "streaming": params.streaming,
        "cells": params.cells,
        "nodes": params.nodes_per_cell,
        "pool_nodes": params.pool_nodes,
    }
    return msgspec.structs.replace(row, **{key: value for key, value in changes.items() if value is not None})


def trace_config(trace: Trace, row: TableRow, steps: int) -> SchedulerConfig:
    params = trace.params
    config = row.config(
        steps=steps,
        groups_per_step=params.groups_per_step,
        executions_per_group=len(trace.dur[0]),
        per_node=params.executions_per_node,
    )
    return require(
        msgspec.structs.replace(
            config, dispatch=params.dispatch, min_supply=params.min_supply, supply_wait_s=params.supply_wait_s
        ),
        "params",
    )


def replay(trace: Trace, row: TableRow, steps: int) -> TraceResult:
    """Runs the controller on the trace; group g uses entry g modulo the number of entries."""
    row = trace_row(trace, row)
    config = trace_config(trace, row, steps)
    params, groups = trace.params, len(trace.dur)
    stats = RunStats()

    def seconds(ticket: Ticket) -> float:
        return trace.dur[ticket.group % groups][ticket.member] * HOUR

    async def main() -> None:
        clock = VirtualClock()
        times = CellTimes(
            to_training_s=params.to_training_s, to_rollout_s=params.to_rollout_s, publication_s=params.publication_s
        )
        environment = Environment(
            clock,
            _Numbers(),
            FixedExecutions(clock, seconds, lambda _: params.grading_s, Graders(clock, params.graders)),
            SimMaterializer(lambda group: equal_parts(trace.work[group.group % groups] * HOUR, params.micro_steps)),
            SimCells(clock, times, row.nodes),
            MemoryJournal(stats.read),
        )
        await Controller(config, environment).run()

    run_virtual(main())
    return TraceResult(
        step_end_hours=stats.step_ends,
        burst_end_hours=stats.burst_ends,
        joins=stats.joins,
        staleness_per_step=stats.staleness,
    )


class _Numbers:
    def query(self, group: int) -> str:
        return str(group)
