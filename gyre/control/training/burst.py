"""A burst: the steps between two publications, and what may not happen in it."""

from gyre.scheduling.ledger import BurstGuard


class Burst:
    def __init__(self, steps: int) -> None:
        self.steps = steps
        """μ, or fewer when the run ends inside the burst."""
        self.taken = 0
        """Steps whose batch has been opened."""
        self.over = False
        """The last update is done: no cell may join before the next burst, whose groups are queued then."""
        self.guard: BurstGuard | None = None
        """What holds from the dispatch to the publication; None outside, and with continuous dispatch."""

    @property
    def first_step(self) -> bool:
        """The open batch is the burst's first one."""
        return self.taken <= 1

    @property
    def last_step(self) -> bool:
        """The open batch is the burst's last one."""
        return self.taken == self.steps
