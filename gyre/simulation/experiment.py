"""One simulated run: the real controller, synthetic cells, executions of a workload; and what came out of it."""

from collections.abc import Callable

import msgspec

from gyre.control.base import Environment, ReadyGroup
from gyre.control.controller import Controller
from gyre.core.events import Event
from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.modes import Mode
from gyre.scheduling.order import LaunchOrder
from gyre.simulation.clock import VirtualClock, run_virtual
from gyre.simulation.loaded import LoadedExecutions
from gyre.simulation.stats import RunStats
from gyre.simulation.synthetic import CellTimes, MemoryJournal, SimCells, SimMaterializer, equal_parts
from gyre.simulation.workload import GroupDraw, Workload, WorkloadParams, training_nodes


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes behind the cells of a configuration."""

    cell_nodes: float
    pool_nodes: float


class Drawn:
    """Draws of the groups that are alive: made at first use, dropped when the group is trained."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._live: dict[int, GroupDraw] = {}

    def query(self, group: int) -> str:
        return f"q{group}"

    def get(self, group: int) -> GroupDraw:
        if group not in self._live:
            self._live[group] = self._workload.draw(group)
        return self._live[group]

    def costs(self, group: ReadyGroup) -> list[float]:
        work = self._live.pop(group.group).work
        return equal_parts(work, self._workload.params.micro_steps)


def simulate(
    config: SchedulerConfig,
    layout: Layout,
    params: WorkloadParams,
    *,
    seed: int,
    times: CellTimes | None = None,
    readers: tuple[Callable[[Event], None], ...] = (),
    order: LaunchOrder | None = None,
    mode: Mode | None = None,
) -> RunStats:
    """Runs `config` on the modelled workload in a fresh virtual loop, deterministic for a seed."""
    stats = RunStats()

    async def main() -> None:
        clock = VirtualClock()
        drawn = Drawn(Workload(params, seed, config.executions_per_group))
        default = CellTimes(publication_s=params.publication_s, update_s=params.update_s)
        cells = SimCells(clock, times or default, training_nodes(params, layout.cell_nodes))

        executions = LoadedExecutions(params, drawn.get)
        cells.on_admitting = lambda engines: executions.served_by(
            sum(layout.pool_nodes if engine >= config.cells else layout.cell_nodes for engine in engines)
        )
        environment = Environment(
            clock, drawn, executions, SimMaterializer(drawn.costs), cells, MemoryJournal(stats.read, *readers)
        )
        await Controller(config, environment, order=order, mode=mode).run()

    run_virtual(main())
    return stats
