"""[evaluation]: how what an execution left is graded."""

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from gyre.core.config import Positive


class EvaluationSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """docs/outcomes.md. One grading may take `harness.budgets.evaluation_s`, or less where the task says."""

    gradings: Positive | None = None
    """Graders that run at a time; as many as the machine has cores when it is left out. Who waits for one spends none
    of the execution's budget and holds no rollout slot."""
    attempts: Positive = 2
    """Gradings of one preserved state until one is valid, while the overall budget lasts."""
    retry_s: Annotated[float, Meta(ge=0)] = 1.0
    """Pause before the second attempt; it doubles with every further one."""
    digest_s: Annotated[float, Meta(gt=0)] = 60.0
    """For reading a workspace to tell whether it is another one. Without a digest it counts as changed."""

    @property
    def at_a_time(self) -> int:
        return self.gradings or os.cpu_count() or 1
