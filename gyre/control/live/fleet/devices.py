"""Which GPUs of one machine each cell gets.

Engine and trainer of a cell share its devices, since at most one of the two holds memory; pool engines have their own.
A process learns its devices from CUDA_VISIBLE_DEVICES: a training rank finds exactly one, an engine those of all its
ranks. Without devices everything runs on the CPU, whatever the machine has.
"""

from collections.abc import Mapping, Sequence

from gyre.core.errors import ConfigError

DeviceAssignment = Mapping[int, Sequence[str]]
"""Device ids of each cell and, from number K on, of each engine of the pool."""


def assign_devices(ids: Sequence[str], cells: Mapping[int, int]) -> DeviceAssignment:
    """`cells`: devices that each cell or pool engine needs. Cells come first, in index order, so that neighbours in
    `ids` share a cell. Raises ConfigError when the ids are too few or one is named twice."""
    if len(set(ids)) < len(ids):
        raise ConfigError(f"devices.ids = {list(ids)} names a device twice; each belongs to one cell")
    needed = sum(cells.values())
    if ids and len(ids) < needed:
        raise ConfigError(f"devices.ids lists {len(ids)} devices and the cells and pool engines need {needed}")
    free = iter(ids)
    return {cell: [next(free) for _ in range(cells[cell])] if ids else [] for cell in sorted(cells)}
