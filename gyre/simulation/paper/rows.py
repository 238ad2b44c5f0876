"""The eleven configurations of the paper's Table 1 (12 steps of NL2RepoBench, 122B, 32 nodes, E[d] = 1.5)."""

from collections.abc import Callable

import msgspec

from gyre.core.errors import ConfigError
from gyre.core.events import Event
from gyre.scheduling.config import ModeName, SchedulerConfig
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.stats import RunStats
from gyre.simulation.workload import WorkloadParams

EXECUTIONS_PER_NODE = 36
"""144 per cell of four nodes (paper §6.1), for pools and coarse cells alike."""


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    mode: ModeName
    streaming: bool
    extra_dispatch: float
    steps_per_burst: int
    cells: int
    nodes: int
    """Per cell."""
    pool_nodes: int
    hours: float
    """The paper's total for 12 steps."""

    def config(
        self,
        *,
        steps: int,
        groups_per_step: int = 32,
        executions_per_group: int = 16,
        per_node: float = EXECUTIONS_PER_NODE,
    ) -> SchedulerConfig:
        return SchedulerConfig(
            mode=self.mode,
            groups_per_step=groups_per_step,
            executions_per_group=executions_per_group,
            steps_per_burst=self.steps_per_burst,
            extra_dispatch=self.extra_dispatch,
            cells=self.cells,
            cell_capacity=round(self.nodes * per_node),
            pool_capacity=round(self.pool_nodes * per_node),
            streaming=self.streaming,
            max_steps=steps,
        )


def _row(name: str, mode: ModeName, streaming: bool, point: tuple[float, int], cells: str, hours: float) -> TableRow:
    """`cells` reads "cells×nodes+pool"."""
    phi, mu = point
    shape, _, pool = cells.partition("+")
    count, _, nodes = shape.partition("×")
    return TableRow(
        name=name,
        mode=mode,
        streaming=streaming,
        extra_dispatch=phi,
        steps_per_burst=mu,
        cells=int(count),
        nodes=int(nodes),
        pool_nodes=int(pool or 0),
        hours=hours,
    )


ROWS: dict[str, TableRow] = {
    row.name: row
    for row in (
        _row("A0", "async", False, (1.5, 1), "1×16+16", 25.08),
        _row("A1", "async", False, (1.5, 1), "1×8+24", 27.01),
        _row("A2", "async", False, (0.5, 3), "1×16+16", 32.58),
        _row("A3", "async", True, (1.5, 1), "1×16+16", 22.18),
        _row("C0", "colocate", False, (0.0, 4), "1×32", 23.23),
        _row("C1", "coarse", False, (0.5, 3), "1×28+4", 22.56),
        _row("C2", "coarse", True, (0.5, 3), "1×28+4", 19.23),
        _row("C3", "coarse", True, (0.5, 3), "1×16+16", 20.69),
        _row("E0", "elastic", True, (0.5, 3), "8×4", 16.12),
        _row("E1", "elastic", True, (1.5, 1), "8×4", 17.87),
        _row("E2", "elastic", True, (0.5, 3), "4×8", 16.47),
    )
}


def find_row(name: str) -> TableRow:
    """Raises ConfigError for an unknown row."""
    if name not in ROWS:
        raise ConfigError(f"There is no row {name!r} in Table 1; allowed: {', '.join(ROWS)}.")
    return ROWS[name]


def run_row(
    row: TableRow, params: WorkloadParams, *, seed: int, steps: int, readers: tuple[Callable[[Event], None], ...] = ()
) -> RunStats:
    """A row on the modelled workload."""
    layout = Layout(cell_nodes=row.nodes, pool_nodes=row.pool_nodes)
    return simulate(row.config(steps=steps), layout, params, seed=seed, readers=readers)
