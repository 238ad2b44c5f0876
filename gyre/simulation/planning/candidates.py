"""Settings to compare with: every one runs on the devices of the configuration that is planned.

Devices are counted in executions that they serve, so cells·cell_capacity + pool_capacity stays. With it stays the
training power of all cells together, except for what a setting moves to the pool. Pure.
"""

import math
from collections.abc import Iterator

import msgspec

from gyre.scheduling.config import SchedulerConfig, problems
from gyre.scheduling.staleness import expected_staleness

BURSTS = (1, 2, 3, 4, 6, 8)
"""Steps per burst that are tried."""
SUPPLIES = (0.03125, 0.125, 0.25, 0.5)
WAITS = (0.0, 0.2, 1.0, 5.0)
"""Multiples of the configuration's supply_wait_s."""


def staleness_of(config: SchedulerConfig) -> float:
    return expected_staleness(extra_dispatch=config.extra_dispatch, steps_per_burst=config.steps_per_burst)


def bursts_and_dispatch(config: SchedulerConfig, bound: float) -> Iterator[SchedulerConfig]:
    """Other (φ, μ) whose mean staleness is at most `bound`, the stalest first: φ in quarters or what the batch allows.
    A mode without extra dispatch refuses φ > 0 itself."""
    grain = next(part for part in (4, 2, 1) if config.groups_per_step % part == 0)
    rooms = [(steps, math.floor((bound - (steps - 1) / 2) * grain + 1e-9)) for steps in BURSTS]
    found = [(extra / grain, steps) for steps, room in rooms for extra in range(room + 1)]
    for extra, steps in sorted(found, key=lambda point: -point[0] - (point[1] - 1) / 2):
        yield msgspec.structs.replace(config, steps_per_burst=steps, extra_dispatch=extra)


def placements(config: SchedulerConfig) -> Iterator[SchedulerConfig]:
    """Elastic: half or twice the cells on the same devices; a cell to the pool, or back."""
    if config.mode != "elastic":
        return
    cells, size, pool = config.cells, config.cell_capacity, config.pool_capacity
    if cells % 2 == 0:
        yield msgspec.structs.replace(config, cells=cells // 2, cell_capacity=size * 2)
    if size % 2 == 0:
        yield msgspec.structs.replace(config, cells=cells * 2, cell_capacity=size // 2)
    if cells > 1:
        yield msgspec.structs.replace(config, cells=cells - 1, pool_capacity=pool + size)
    if pool >= size:
        yield msgspec.structs.replace(config, cells=cells + 1, pool_capacity=pool - size)


def supply_rules(config: SchedulerConfig, own: SchedulerConfig) -> Iterator[SchedulerConfig]:
    """Other conditions for a cell to join."""
    if config.mode == "async":
        return
    for supply in SUPPLIES:
        yield msgspec.structs.replace(config, min_supply=supply)
    for wait in WAITS:
        yield msgspec.structs.replace(config, supply_wait_s=wait * own.supply_wait_s)


def orders(config: SchedulerConfig, predicts: bool) -> Iterator[SchedulerConfig]:
    yield msgspec.structs.replace(config, launch_order="fifo")
    if predicts:
        yield msgspec.structs.replace(config, launch_order="longest_first")


def neighbours(config: SchedulerConfig, own: SchedulerConfig, bound: float, predicts: bool) -> list[SchedulerConfig]:
    """Accepted settings that differ from `config` in one respect."""
    found = [
        *orders(config, predicts),
        *placements(config),
        *bursts_and_dispatch(config, bound),
        *supply_rules(config, own),
    ]
    return [one for one in found if one != config and not problems(one)]
