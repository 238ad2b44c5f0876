"""The rules of the elastic scheduler as pure functions (paper §4.2; docs/scheduling.md has them in full).

k counts the cells that are out of rollout: training, or on their way in or out.
"""

import msgspec

from gyre.scheduling.config import SchedulerConfig, capacity


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision may depend on."""

    now: float
    """Seconds on the run's clock."""
    waterlevel: int
    """w = d − f."""
    training: int
    """k."""
    ready: int
    """Ready groups that no batch has taken."""
    needed: int
    """Groups that the current batch (at a boundary: the next one) still has to take."""
    supply_since: float | None
    """Since when the supply has held without a break or a timer reset; None when it does not hold."""
    boundary: bool = False
    """True right after a publication, before the next dispatch."""


def supply(ready: int, needed: int) -> int:
    """Ready unclaimed groups, capped by what the batch can still take."""
    return min(ready, needed)


def has_supply(config: SchedulerConfig, ready: int, needed: int) -> bool:
    return supply(ready, needed) >= config.supply_groups


def waterlevel_allows(config: SchedulerConfig, waterlevel: int, training: int) -> bool:
    """w ≤ C_R − C_e: what is outstanding fits in the rollout capacity that is left after one more cell leaves."""
    return training < config.cells and waterlevel <= capacity(config, training) - config.cell_capacity


def supply_holds_at(config: SchedulerConfig, situation: Situation) -> float | None:
    """The time from which the supply check is (or will be) met, if nothing changes; None without supply."""
    return None if situation.supply_since is None else situation.supply_since + config.supply_wait_s


def core_stays(config: SchedulerConfig, situation: Situation) -> bool:
    """Burst end: the next batch has its ρ_min·B groups and w + μNB ≤ C_s + (K−1)·C_e (no timer)."""
    outstanding = situation.waterlevel + config.steps_per_burst * config.executions_per_group * config.groups_per_step
    return has_supply(config, situation.ready, situation.needed) and outstanding <= capacity(config, 1)


def batch_may_open(config: SchedulerConfig, ready: int, first_of_burst: bool, steps_left: int) -> bool:
    """Streaming opens every batch at once; without it the first of a burst waits for the groups of all its steps.

    `steps_left` is the number of steps of this burst not yet taken: μ, or fewer when the run ends inside the burst.
    """
    return config.streaming or not first_of_burst or ready >= steps_left * config.groups_per_step


class SupplyTimer:
    """Since when the supply has held; resets after every transition and at every batch start."""

    def __init__(self) -> None:
        self.since: float | None = None

    def observe(self, now: float, holds: bool) -> None:
        if not holds:
            self.since = None
        elif self.since is None:
            self.since = now

    def reset(self, now: float, holds: bool) -> None:
        self.since = now if holds else None
