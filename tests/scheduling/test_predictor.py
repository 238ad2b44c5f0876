"""Predicted durations against a world whose law is known."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.order import Fifo, LongestFirst, make_order
from gyre.scheduling.predictor import DurationPredictor

CONFIG = SchedulerConfig(
    groups_per_step=4,
    executions_per_group=2,
    steps_per_burst=1,
    cells=1,
    cell_capacity=4,
    max_steps=1,
    launch_order="longest_first",
)


def world(seed: int, tasks: int, own: float = 0.4) -> tuple[dict[str, list[float]], dict[str, float], random.Random]:
    """(features, true log seconds, source of executions): the first feature explains most, the second is noise."""
    rng = random.Random(seed)
    features = {f"t{i}": [rng.gauss(5, 2), rng.gauss(0, 100)] for i in range(tasks)}
    truth = {name: 6 + 0.3 * x[0] + rng.gauss(0, 0.2) for name, x in features.items()}
    return features, truth, rng


def error(predictor: DurationPredictor, truth: dict[str, float], names: list[str]) -> float:
    """Root mean square of log predicted / true, without a common factor."""
    apart = [math.log(predictor.predict(name) or math.nan) - truth[name] for name in names]
    return float(np.std(apart))


def test_nothing_is_predicted_before_anything_was_seen():
    assert DurationPredictor().predict("t") is None
    assert LongestFirst().arrange([(3, "a"), (1, "b")]) == [(3, "a"), (1, "b")]


def test_unseen_tasks_are_predicted_from_their_features():
    features, truth, rng = world(0, 300)
    predictor = DurationPredictor(features.__getitem__)
    for name in list(truth)[:200]:
        for _ in range(4):
            predictor.observe(name, math.exp(truth[name] + rng.gauss(0, 0.4)))
    unseen = list(truth)[200:]
    spread = float(np.std([truth[name] for name in unseen]))
    assert error(predictor, truth, unseen) < 0.25 < 0.5 * spread


def test_history_of_a_task_counts_more_the_longer_it_is():
    features, truth, rng = world(1, 60)
    predictor = DurationPredictor(features.__getitem__)
    errors = []
    for _ in range(4):
        for name in truth:
            for _ in range(4):
                predictor.observe(name, math.exp(truth[name] + rng.gauss(0, 0.4)))
        errors.append(error(predictor, truth, list(truth)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.11


def test_one_odd_execution_moves_a_task_less_than_its_mean():
    predictor = DurationPredictor()
    rng = random.Random(2)
    for name in range(50):
        for _ in range(4):
            predictor.observe(str(name), math.exp(6 + rng.gauss(0, 0.5)))
    predictor.observe("odd", math.exp(9))
    assert math.log(predictor.predict("odd") or 0) < (6 + 9) / 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e9)), max_size=20), st.integers(0, 3))
def test_any_history_gives_finite_predictions(history, count):
    predictor = DurationPredictor(lambda _: [1.0] * count)
    for task, seconds in history:
        predictor.observe(task, seconds)
    for task in "abcd":
        seconds = predictor.predict(task)
        assert (seconds is None) == (not history)
        assert seconds is None or (math.isfinite(seconds) and seconds > 0)


def test_longest_first_launches_by_descending_prediction():
    length = {"short": 1.0, "long": 2.0, "new": 3.0}
    order = make_order(CONFIG, lambda query: [length[query]])
    assert isinstance(order, LongestFirst)
    for _ in range(3):
        order.observe("short", 10.0)
        order.observe("long", 20.0)
    entries = [(0, "short"), (1, "long"), (2, "short"), (3, "new")]
    assert order.arrange(entries) == [(3, "new"), (1, "long"), (0, "short"), (2, "short")]
    assert order.predict("long") == pytest.approx(20.0, rel=0.2)


def test_fifo_keeps_dispatch_order_and_predicts_nothing():
    fifo = make_order(SchedulerConfig(groups_per_step=4, executions_per_group=2, cells=1, cell_capacity=4, max_steps=1))
    assert isinstance(fifo, Fifo)
    fifo.observe("a", 1.0)
    assert fifo.arrange([(2, "a"), (1, "b")]) == [(2, "a"), (1, "b")]
    assert fifo.predict("a") is None
