"""The integer staleness identity (paper appendix A; derived in docs/staleness.md).

Over n complete bursts that consume μB groups each:

    Σd = A_0 + μ·ΣP_j + n·B·μ(μ−1)/2 − A_n

P_j: groups dispatched before publication j and not consumed at it. A_j: their summed ages, published version − v_d.
It counts events only, so it holds for any latency, order, placement and for both kinds of dispatch.
"""

from collections.abc import Iterable

from gyre.core.errors import InvariantViolation


class StalenessAccount:
    """Adds up both sides of the identity as a run goes."""

    def __init__(self, *, steps_per_burst: int, batch_groups: int, ages: Iterable[int] = ()) -> None:
        """`ages`: of the groups that a resumed run starts with (A_0)."""
        self._mu = steps_per_burst
        self._batch = batch_groups
        self.restart(ages)

    def restart(self, ages: Iterable[int]) -> None:
        """The run went back to a checkpoint; `ages` as at the start."""
        self._initial_age = sum(ages)
        self._outstanding = 0
        self.consumed = 0
        """Σd over the groups trained so far."""
        self.groups = 0
        self.bursts = 0

    def step(self, staleness: list[int]) -> None:
        self.consumed += sum(staleness)
        self.groups += len(staleness)

    def publication(self, ages: Iterable[int]) -> None:
        """A full burst has ended. `ages`: published − v_d of each unconsumed group, after the publication and before
        the next dispatch.

        Raises InvariantViolation when the two sides differ.
        """
        ages = list(ages)
        self.bursts += 1
        self._outstanding += len(ages)
        expected = (
            self._initial_age
            + self._mu * self._outstanding
            + self.bursts * self._batch * self._mu * (self._mu - 1) // 2
            - sum(ages)
        )
        if expected != self.consumed:
            raise InvariantViolation(
                f"Staleness identity broken after {self.bursts} bursts: Σd = {self.consumed}, expected {expected}."
            )


def expected_staleness(*, extra_dispatch: float, steps_per_burst: int) -> float:
    """Steady-state mean of boundary dispatch: φ + (μ−1)/2."""
    return extra_dispatch + (steps_per_burst - 1) / 2
