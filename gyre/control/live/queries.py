"""`Queries` over a task directory: every task once per shuffled epoch."""

import random
from collections.abc import Sequence


class ShuffledQueries:
    """Pure in (seed, group): a resumed run asks for the same tasks."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._names = sorted(names)
        self._seed = seed

    def query(self, group: int) -> str:
        epoch, index = divmod(group, len(self._names))
        order = list(self._names)
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order[index]
