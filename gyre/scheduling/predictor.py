"""How long an execution of a task will take: history of the task, features of its prompt, learnt while the run goes.

The model is on the logarithm of seconds: an execution of task q takes w·x(q) + u(q) + e, with the task's features x, a
part u that all executions of the task share, and a part e of its own. w is fitted by ridge regression on the means of
the tasks seen so far; the mean of a task with n executions counts n·τ²/(n·τ² + σ²) of the way from w·x to what was
seen, with τ² and σ² the variances of u and e (empirical Bayes). So a task that was never run is predicted from its
prompt, and one that was run often from its history. Only the order of predictions decides a launch order, so a drift
that all tasks share does no harm.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Features = Callable[[str], Sequence[float]]
"""Of a task: always the same number of finite values, on any scale; none is fine."""

RIDGE = 1.0
"""Pull of each coefficient towards zero, in tasks: features are standardized first."""


class DurationPredictor:
    """Grows with the number of tasks, not with executions. Fitting waits for the next prediction."""

    def __init__(self, features: Features = lambda _: ()) -> None:
        self._features = features
        self._tasks: dict[str, _Seen] = {}
        self._fit: _Fit | None = None

    def observe(self, task: str, seconds: float) -> None:
        """An execution of the task took this long."""
        if task not in self._tasks:
            self._tasks[task] = _Seen(self._features(task))
        self._tasks[task].add(math.log(max(seconds, 1e-3)))
        self._fit = None

    def predict(self, task: str) -> float | None:
        """Seconds of one execution (the median); None before any was observed."""
        if not self._tasks:
            return None
        if self._fit is None:
            self._fit = _Fit(list(self._tasks.values()))
        seen = self._tasks.get(task)
        features = self._features(task) if seen is None else seen.features
        return math.exp(self._fit.predict(features, seen))


class _Seen:
    """Executions of one task, as log seconds."""

    def __init__(self, features: Sequence[float]) -> None:
        self.features = features
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        """Σ (y − mean)²."""

    def add(self, value: float) -> None:
        self.count += 1
        apart = value - self.mean
        self.mean += apart / self.count
        self.squares += apart * (value - self.mean)


class _Fit:
    def __init__(self, tasks: Sequence[_Seen]) -> None:
        means = np.array([task.mean for task in tasks])
        counts = np.array([task.count for task in tasks])
        raw = np.array([task.features for task in tasks], dtype=float).reshape(len(tasks), -1)
        self._centre = raw.mean(axis=0)
        spread = raw.std(axis=0)
        self._scale = np.where(spread > 0, spread, 1.0)
        self._mean = float(means.mean())
        x = self._standard(raw)
        ridge = x.T @ x + RIDGE * np.eye(x.shape[1])
        self._weights = np.linalg.solve(ridge, x.T @ (means - self._mean))
        free = float((counts - 1).sum())
        self._own = sum(task.squares for task in tasks) / free if free else 0.0
        """σ²"""
        left = means - self._mean - x @ self._weights
        self._shared = max(0.0, float((left**2).mean() - (self._own / counts).mean()))
        """τ²: what the means differ by beyond what few executions explain."""

    def predict(self, features: Sequence[float], seen: _Seen | None) -> float:
        base = self._mean + float(self._standard(np.array(features, dtype=float)) @ self._weights)
        if seen is None:
            return base
        noise = self._own / seen.count
        trust = self._shared / (self._shared + noise) if self._shared + noise > 0 else 1.0
        return base + trust * (seen.mean - base)

    def _standard(self, raw: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = (raw - self._centre) / self._scale
        return scaled
