"""`[scheduler]`: what a step is, how much may be in flight, and which cells exist (paper §2.2, §4).

Each key has a plain name; its docstring gives the paper's symbol. `problems` is pure and returns every reason to
refuse; `require` raises the first one.
"""

import math
from typing import ClassVar, Literal

import msgspec

from gyre.core.errors import ConfigError

ModeName = Literal["elastic", "async", "colocate", "coarse"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    RENAMED_KEYS: ClassVar[dict[str, str]] = {
        "policy": "mode",
        "B": "groups_per_step",
        "N": "executions_per_group",
        "mu": "steps_per_burst",
        "phi": "extra_dispatch",
        "K": "cells",
        "C_e": "cell_capacity",
        "C_s": "pool_capacity",
        "rho_min": "min_supply",
        "tau_s": "supply_wait_s",
    }

    mode: ModeName = "elastic"
    groups_per_step: int
    """B: query groups per optimizer step."""
    executions_per_group: int
    """N: executions per group."""
    steps_per_burst: int = 1
    """μ: steps per burst, that is between two publications."""
    extra_dispatch: float = 0.0
    """φ: extra dispatch in units of B; φ·B is a whole number of groups."""
    cells: int
    """K: elastic cells; cell 0 is the core. With `async` all K cells train and never serve."""
    cell_capacity: int
    """C_e: concurrent executions that one cell serves in rollout."""
    pool_capacity: int = 0
    """C_s: concurrent executions of the standalone pool, all its engines together."""
    pool_engines: int = 1
    """Engines of the pool, numbered from K on; without meaning when C_s = 0."""
    min_supply: float = 0.125
    """ρ_min, supply check: ready groups needed before a cell may join, in units of B."""
    supply_wait_s: float = 60.0
    """τ, supply check: seconds for which the supply must have held without a break."""
    streaming: bool = True
    """False: the first step of a burst waits for all μB groups."""
    dispatch: Literal["boundary", "continuous"] = "boundary"
    """boundary: μB groups after each publication; continuous: one group whenever one becomes ready."""
    launch_order: Literal["fifo", "longest_first"] = "fifo"
    """fifo: groups of one version launch, and once ready train, in dispatch order. longest_first: they launch by
    descending predicted duration and train by ascending measured duration."""
    max_steps: int
    """Optimizer steps of the run."""
    checkpoint_every: int = 1
    """Bursts between two checkpoints; the last step of a run is always saved."""

    @property
    def depth(self) -> int:
        """(φ+μ)·B: groups that are dispatched and not consumed right after a publication."""
        return round((self.extra_dispatch + self.steps_per_burst) * self.groups_per_step)

    @property
    def supply_groups(self) -> float:
        """ρ_min·B."""
        return self.min_supply * self.groups_per_step

    @property
    def pool(self) -> list[int]:
        """Numbers of the pool's engines: K, K+1, …"""
        return list(range(self.cells, self.cells + self.pool_engines)) if self.pool_capacity else []


def capacity(config: SchedulerConfig, training: int) -> int:
    """C_R = C_s + (K − k)·C_e, with k cells out of rollout (paper §4.1)."""
    return config.pool_capacity + (config.cells - training) * config.cell_capacity


def problems(config: SchedulerConfig, section: str = "scheduler") -> list[str]:
    """Every reason why this configuration cannot run; one sentence each, naming key, value and what is allowed."""
    found = [
        f"{section}.{key} = {getattr(config, key)} is too small; allowed: ≥ {least}."
        for key, least in _LEAST.items()
        if getattr(config, key) < least
    ]
    if not 0 < config.min_supply <= 1:
        found.append(
            f"{section}.min_supply = {config.min_supply} is outside (0, 1]; a batch holds groups_per_step groups, "
            "so no more than all of them can be waited for."
        )
    if found:
        return found
    extra = config.extra_dispatch * config.groups_per_step
    if not math.isfinite(extra) or abs(extra - round(extra)) > 1e-9:
        found.append(
            f"{section}.extra_dispatch = {config.extra_dispatch} with groups_per_step = {config.groups_per_step} is "
            f"{extra:g} extra groups; their product must be a whole number."
        )
    found += _placement(config, section)
    if not found and config.dispatch == "continuous":
        found += _continuous(config, section)
    return found


def require(config: SchedulerConfig, section: str = "scheduler") -> SchedulerConfig:
    """The configuration itself; raises ConfigError with the first problem."""
    for sentence in problems(config, section):
        raise ConfigError(sentence)
    return config


_LEAST = {
    "groups_per_step": 1,
    "executions_per_group": 1,
    "steps_per_burst": 1,
    "extra_dispatch": 0,
    "cells": 1,
    "cell_capacity": 0,
    "pool_capacity": 0,
    "pool_engines": 1,
    "supply_wait_s": 0,
    "max_steps": 1,
    "checkpoint_every": 1,
}


def _placement(config: SchedulerConfig, section: str) -> list[str]:
    """Cells and pool against the mode."""
    found: list[str] = []
    mode = config.mode
    if mode in ("colocate", "coarse") and config.cells != 1:
        found.append(
            f"{section}.cells = {config.cells} with mode {mode}: the whole pool switches as one cell, so it must be 1; "
            "use mode elastic for cells that switch one by one."
        )
    if mode == "colocate" and config.pool_capacity:
        found.append(
            f"{section}.pool_capacity = {config.pool_capacity} with mode colocate: nothing stays in rollout; "
            "use mode coarse."
        )
    if mode == "colocate" and config.extra_dispatch:
        found.append(
            f"{section}.extra_dispatch = {config.extra_dispatch} with mode colocate: all executions must end before "
            "the pool switches, so nothing extra can be in flight; it must be 0."
        )
    if mode in ("async", "coarse") and not config.pool_capacity:
        found.append(
            f"{section}.pool_capacity = 0 with mode {mode}: its standalone pool must serve at least one execution."
        )
    if 0 < config.pool_capacity < config.pool_engines:
        found.append(
            f"{section}.pool_engines = {config.pool_engines} is more than pool_capacity = {config.pool_capacity}: each "
            "engine of the pool must serve at least one execution."
        )
    if mode != "async" and config.cell_capacity < 1:
        found.append(
            f"{section}.cell_capacity = {config.cell_capacity} with mode {mode}: a cell in rollout must serve "
            "at least one execution."
        )
    most = capacity(config, config.cells if mode == "async" else 0)
    if most < config.executions_per_group and not found:
        formula = "pool_capacity" if mode == "async" else "pool_capacity + cells · cell_capacity"
        found.append(
            f"{section}.executions_per_group = {config.executions_per_group} is more than the rollout capacity "
            f"{formula} = {most}; one group must fit at once: raise the capacity or the number of cells, or take fewer "
            "executions per group."
        )
    return found


def _continuous(config: SchedulerConfig, section: str) -> list[str]:
    """Continuous dispatch refills while a burst runs, so the waterlevel must leave room for the core from the start."""
    if config.mode == "async":
        return []
    level, room = config.depth * config.executions_per_group, capacity(config, 1)
    if level <= room:
        return []
    return [
        f"{section}.dispatch = continuous with mode {config.mode} keeps up to (φ+μ)·B·N = {level} executions in "
        f"flight but only C_s + (K−1)·C_e = {room} fit beside a training core, so it might never train; use boundary "
        "dispatch or more capacity."
    ]
