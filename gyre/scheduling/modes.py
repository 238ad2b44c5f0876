"""Who trains: each mode is one decision function on an explicit `Situation` (paper §2.2, §4.2).

A mode answers how many cells of the prefix 0, 1, … should be in the training role now, and when to ask again if
nothing happens before. Inside a burst the answer is k or k + 1: cells transition one at a time and stay for the burst.
At a boundary (`Situation.boundary`, satellites are already back) it says whether the core stays: 1 or 0; a fixed
partition answers K.
"""

from typing import Protocol

import msgspec

from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.rules import Situation, core_stays, supply_holds_at, waterlevel_allows


class ModeDecision(msgspec.Struct, frozen=True):
    training: int
    recheck_at: float | None = None
    """Ask again at this time; None: only a change of the situation can change the answer."""


class Mode(Protocol):
    releases: bool
    """Whether the satellites return to rollout at the end of a burst."""

    def decide(self, situation: Situation) -> ModeDecision: ...


class Elastic:
    """The paper's: the next cell joins when waterlevel and supply allow it."""

    releases = True

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def decide(self, situation: Situation) -> ModeDecision:
        config, k = self._config, situation.training
        if situation.boundary:
            return ModeDecision(1 if core_stays(config, situation) else 0)
        if not waterlevel_allows(config, situation.waterlevel, k):
            return ModeDecision(k)
        allowed_at = supply_holds_at(config, situation)
        if allowed_at is None or situation.now < allowed_at:
            return ModeDecision(k, allowed_at)
        return ModeDecision(k + 1)


class Coarse(Elastic):
    """One big cell and a pool: the elastic rules with K = 1, so the cell switches when the pool can carry the rest."""


class Colocate(Elastic):
    """One cell and no pool: the elastic rules with K = 1 and C_s = 0, so w must reach 0 first."""


class Async:
    """Fixed partition: all K cells always train, the pool always serves."""

    releases = False

    def __init__(self, config: SchedulerConfig) -> None:
        self._cells = config.cells

    def decide(self, situation: Situation) -> ModeDecision:  # noqa: ARG002 - a fixed partition looks at nothing
        return ModeDecision(self._cells)


def make_mode(config: SchedulerConfig) -> Mode:
    match config.mode:
        case "elastic":
            return Elastic(config)
        case "coarse":
            return Coarse(config)
        case "colocate":
            return Colocate(config)
        case "async":
            return Async(config)
