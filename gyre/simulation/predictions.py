"""A launch order whose predictions have a known quality, for simulated executions."""

import math
import random
from collections.abc import Callable

from gyre.scheduling.order import Fifo, LaunchOrder, LongestFirst
from gyre.simulation.workload import Workload, WorkloadParams


def predicted_order(params: WorkloadParams, seed: int, members: int, log_error: float | None) -> LaunchOrder:
    """longest_first by the slowest execution of a group times exp(log_error·z); None is fifo, 0 an oracle."""
    if log_error is None:
        return Fifo()
    workload = Workload(params, seed, members)

    def predict(query: str) -> float:
        noise = random.Random(f"{seed}/{query}").gauss(0.0, 1.0)
        return max(workload.draw(int(query.removeprefix("q"))).harness_s) * math.exp(log_error * noise)

    return Predicted(predict)


class Predicted(LongestFirst):
    """Only the predictions under test: nothing is learnt."""

    def __init__(self, prediction: Callable[[str], float]) -> None:
        super().__init__()
        self._prediction = prediction

    def predict(self, query: str) -> float:
        return self._prediction(query)
