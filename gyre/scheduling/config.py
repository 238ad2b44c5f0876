"""`[scheduler]`: what a step is, how much may be in flight, and which cells exist (paper §2.2, §4).

Names are the paper's. `problems` is pure and returns every reason to refuse; `require` raises the first one.
"""

import math
from typing import Literal

import msgspec

from gyre.core.errors import ConfigError

PolicyName = Literal["elastic", "async", "colocate", "coarse"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: PolicyName = "elastic"
    B: int
    """Query groups per optimizer step."""
    N: int
    """Executions per group."""
    mu: int = 1
    """Steps per burst, that is between two publications."""
    phi: float = 0.0
    """Extra dispatch in units of B; φ·B is a whole number of groups."""
    K: int
    """Elastic cells; cell 0 is the core. With `async` all K cells train and never serve."""
    C_e: int
    """Concurrent executions that one cell serves in rollout."""
    C_s: int = 0
    """Concurrent executions of the standalone pool, all its engines together."""
    pool_engines: int = 1
    """Engines of the pool, numbered −1, −2, …; without meaning when C_s = 0."""
    rho_min: float = 0.125
    """Supply check: ready groups needed before a cell may join, in units of B."""
    tau_s: float = 60.0
    """Supply check: seconds for which the supply must have held without a break."""
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
        return round((self.phi + self.mu) * self.B)

    @property
    def supply_groups(self) -> float:
        """ρ_min·B."""
        return self.rho_min * self.B

    @property
    def pool(self) -> list[int]:
        """Ids of the pool's engines."""
        return [-1 - i for i in range(self.pool_engines)] if self.C_s else []


def capacity(config: SchedulerConfig, training: int) -> int:
    """C_R = C_s + (K − k)·C_e, with k cells out of rollout (paper §4.1)."""
    return config.C_s + (config.K - training) * config.C_e


def problems(config: SchedulerConfig, section: str = "scheduler") -> list[str]:
    """Every reason why this configuration cannot run; one sentence each, naming key, value and what is allowed."""
    found = [
        f"{section}.{key} = {getattr(config, key)} is too small; allowed: ≥ {least}."
        for key, least in _LEAST.items()
        if getattr(config, key) < least
    ]
    if not 0 < config.rho_min <= 1:
        found.append(
            f"{section}.rho_min = {config.rho_min} is outside (0, 1]; a batch holds B groups, so no more than B can be "
            "waited for."
        )
    if found:
        return found
    extra = config.phi * config.B
    if not math.isfinite(extra) or abs(extra - round(extra)) > 1e-9:
        found.append(
            f"{section}.phi = {config.phi} with B = {config.B} is {extra:g} extra groups; φ·B must be a whole number."
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
    "B": 1,
    "N": 1,
    "mu": 1,
    "phi": 0,
    "K": 1,
    "C_e": 0,
    "C_s": 0,
    "pool_engines": 1,
    "tau_s": 0,
    "max_steps": 1,
    "checkpoint_every": 1,
}


def _placement(config: SchedulerConfig, section: str) -> list[str]:
    """Cells and pool against the policy."""
    found: list[str] = []
    policy = config.policy
    if policy in ("colocate", "coarse") and config.K != 1:
        found.append(
            f"{section}.K = {config.K} with policy {policy}: the whole pool switches as one cell, so K must be 1; "
            "use policy elastic for cells that switch one by one."
        )
    if policy == "colocate" and config.C_s:
        found.append(f"{section}.C_s = {config.C_s} with policy colocate: nothing stays in rollout; use policy coarse.")
    if policy == "colocate" and config.phi:
        found.append(
            f"{section}.phi = {config.phi} with policy colocate: all executions must end before the pool switches, so "
            "nothing extra can be in flight; φ must be 0."
        )
    if policy in ("async", "coarse") and not config.C_s:
        found.append(f"{section}.C_s = 0 with policy {policy}: its standalone pool must serve at least one execution.")
    if 0 < config.C_s < config.pool_engines:
        found.append(
            f"{section}.pool_engines = {config.pool_engines} is more than C_s = {config.C_s}: each engine of the pool "
            "must serve at least one execution."
        )
    if policy != "async" and config.C_e < 1:
        found.append(f"{section}.C_e = {config.C_e} with policy {policy}: a cell in rollout must serve ≥ 1 execution.")
    most = capacity(config, config.K if policy == "async" else 0)
    if most < config.N and not found:
        formula = "C_s" if policy == "async" else "C_s + K·C_e"
        found.append(
            f"{section}.N = {config.N} is more than the rollout capacity {formula} = {most}; one group must fit at "
            "once: raise C_e or K, or lower N."
        )
    return found


def _continuous(config: SchedulerConfig, section: str) -> list[str]:
    """Continuous dispatch refills while a burst runs, so the waterlevel must leave room for the core from the start."""
    if config.policy == "async":
        return []
    level, room = config.depth * config.N, capacity(config, 1)
    if level <= room:
        return []
    return [
        f"{section}.dispatch = continuous with policy {config.policy} keeps up to (φ+μ)·B·N = {level} executions in "
        f"flight but only C_s + (K−1)·C_e = {room} fit beside a training core, so it might never train; use boundary "
        "dispatch or more capacity."
    ]
