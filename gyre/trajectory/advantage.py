"""Group-relative advantages over the designated outcomes of a group's N executions.

The paper computes them "from the group's scalar rewards" (§2.1) with reference to GRPO (Shao et al., 2024) and prints
no formula; GRPO's is Â_i = (r_i − mean(r)) / std(r). Here std is the population standard deviation over the group. No ε
is added: a group of equal rewards has zero advantages instead of a division by zero.
"""

import math
from collections.abc import Sequence

from gyre.core.records import Outcome, Validity

REWARD_RESOLUTION = 1e-9
"""Rewards closer than this are equal: rounding of partial credits must not become an advantage of ±1."""


def group_advantages(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Execution id → Â_i; None excludes the execution from loss and statistics (UNRESOLVED).

    VALID executions count with their reward, zero like any other. NO_WORK counts with reward 0; its dummy has no
    target, so its advantage reaches no gradient."""
    rewards = {
        outcome.execution_id: outcome.reward if outcome.validity is Validity.VALID else 0.0
        for outcome in outcomes
        if outcome.validity is not Validity.UNRESOLVED
    }
    advantages: dict[str, float | None] = {outcome.execution_id: None for outcome in outcomes}
    if not rewards or max(rewards.values()) - min(rewards.values()) <= REWARD_RESOLUTION:
        advantages.update(dict.fromkeys(rewards, 0.0))
        return advantages
    mean = math.fsum(rewards.values()) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards.values()) / len(rewards))
    advantages.update({execution: (reward - mean) / deviation for execution, reward in rewards.items()})
    return advantages
