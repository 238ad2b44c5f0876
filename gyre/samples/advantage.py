"""Group-relative advantages over the designated outcomes of a group's N executions.

The paper computes them "from the group's scalar rewards" (§2.1) with reference to GRPO (Shao et al., 2024) and prints
no formula; GRPO's is Â_i = (r_i − mean(r)) / std(r). Here std is the population standard deviation over the group. No ε
is added: a group of equal rewards has zero advantages instead of a division by zero.

Â does not depend on the unit of the rewards, so it is computed from r / 2^e with 2^e just above the largest |r|: exact
for all but rewards 2^1000 times smaller than another, and no finite reward overflows or vanishes.
"""

import math
from collections.abc import Sequence

from gyre.core.records import Outcome, Validity

REWARD_RESOLUTION = 1e-9
"""Rewards whose difference is a smaller share of the largest are equal: rounding of partial credits must not become an
advantage of ±1."""


def group_advantages(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Execution id → Â_i; None excludes the execution from loss and statistics (UNRESOLVED, or no finite reward).

    VALID executions count with their reward, zero like any other. NO_WORK counts with reward 0; its dummy has no
    target, so its advantage reaches no gradient."""
    advantages: dict[str, float | None] = {outcome.execution_id: None for outcome in outcomes}
    counted = [(outcome.execution_id, reward) for outcome in outcomes if (reward := _counted(outcome)) is not None]
    advantages.update(_normalised(dict(counted)))
    return advantages


def mean_reward(outcomes: Sequence[Outcome]) -> float:
    """Over the rewards that count; 0 when there is none. Finite."""
    rewards = [reward for outcome in outcomes if (reward := _counted(outcome)) is not None]
    if not rewards:
        return 0.0
    scaled, exponent = _scaled(rewards)
    # The mean lies between the rewards; its rounding might not.
    mean = max(min(scaled), min(max(scaled), math.fsum(scaled) / len(scaled)))
    return math.ldexp(mean, exponent)


def _counted(outcome: Outcome) -> float | None:
    """The reward with which an execution counts in the statistics; None when it does not."""
    if outcome.validity is Validity.UNRESOLVED:
        return None
    reward = outcome.reward if outcome.validity is Validity.VALID else 0.0
    return reward if math.isfinite(reward) else None


def _normalised(rewards: dict[str, float]) -> dict[str, float]:
    scaled, _ = _scaled(list(rewards.values()))
    if not scaled or max(scaled) - min(scaled) <= REWARD_RESOLUTION * max(map(abs, scaled)):
        return dict.fromkeys(rewards, 0.0)
    mean = math.fsum(scaled) / len(scaled)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scaled) / len(scaled))
    return {execution: (reward - mean) / deviation for execution, reward in zip(rewards, scaled, strict=True)}


def _scaled(rewards: list[float]) -> tuple[list[float], int]:
    """The rewards divided by 2 ** exponent, the largest in [½, 1)."""
    _, exponent = math.frexp(max(map(abs, rewards), default=0.0))
    return [math.ldexp(reward, -exponent) for reward in rewards], exponent
