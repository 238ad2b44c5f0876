"""Eq. 5–6 against a brute-force evaluation in plain Python floats (cases T19, T20, T22)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.training.step.objective import ObjectiveConfig, keeps_gradient, log_ratios, sequence_ratio, token_losses

CONFIG = ObjectiveConfig()
logprob = st.floats(-30.0, -1e-3)
targets = st.lists(st.tuples(logprob, st.floats(-3.0, 3.0)), min_size=1, max_size=12)
"""(behaviour log-prob, change since): ratios from e⁻³ to e³ cross the cap, single-token lists cross the clip edges."""


def brute_force(current: list[float], behaviour: list[float], advantage: float) -> tuple[float, list[float]]:
    """(Σ ℓ_u, ∂Σℓ/∂log π_u) straight from the formulas of docs/objective.md."""
    ratios = [math.exp(c - b) for c, b in zip(current, behaviour, strict=True)]
    s = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    m = 0.0 if (advantage > 0 and s > 1.005) or (advantage < 0 and s < 0.995) else 1.0
    total, gradient = 0.0, []
    for ratio, log_pi in zip(ratios, current, strict=True):
        coefficient = -m * min(ratio, 5.0) * advantage
        value = coefficient * log_pi
        total += min(100.0, value)
        gradient.append(coefficient if value <= 100.0 else 0.0)
    return total, gradient


def evaluate(current: list[float], behaviour: list[float], advantage: float) -> tuple[float, list[float]]:
    logprobs = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    recorded = torch.tensor(behaviour, dtype=torch.float64)
    keeps = keeps_gradient(sequence_ratio(log_ratios(logprobs, recorded)), advantage, CONFIG)
    loss = token_losses(logprobs, recorded, advantage, keeps, CONFIG).sum()
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist()


@settings(max_examples=200)
@given(targets, st.floats(-3.0, 3.0))
def test_loss_and_gradient_equal_the_formulas(pairs: list[tuple[float, float]], advantage: float) -> None:
    behaviour = [b for b, _ in pairs]
    current = [min(-1e-4, b + change) for b, change in pairs]
    loss, gradient = evaluate(current, behaviour, advantage)
    expected_loss, expected_gradient = brute_force(current, behaviour, advantage)
    assert loss == pytest.approx(expected_loss, rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx(expected_gradient, rel=1e-12, abs=1e-12)


@settings(max_examples=60)
@given(targets, st.sampled_from([-1.0, 1.0]), st.randoms())
def test_order_of_targets_does_not_matter(pairs: list[tuple[float, float]], advantage: float, rng: object) -> None:
    shuffled = list(pairs)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    losses = [evaluate([b + c for b, c in ps], [b for b, _ in ps], advantage)[0] for ps in (pairs, shuffled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "keeps"),
    [
        (1.005, 1.0, True),
        (1.0050001, 1.0, False),
        (0.5, 1.0, True),
        (0.995, -1.0, True),
        (0.9949999, -1.0, False),
        (2.0, -1.0, True),
        (2.0, 0.0, True),
        (0.5, 0.0, True),
    ],
)
def test_clip_edges_depend_on_the_sign_of_the_advantage(ratio: float, advantage: float, keeps: bool) -> None:
    assert keeps_gradient(ratio, advantage, CONFIG) is keeps


def test_clip_is_decided_by_the_mean_over_the_execution_not_by_single_tokens() -> None:
    behaviour = [-2.0, -2.0]
    loss, gradient = evaluate([-1.0, -3.0], behaviour, advantage=1.0)
    assert loss != 0.0
    assert gradient == pytest.approx([-math.exp(1.0), -math.exp(-1.0)])
    assert evaluate([-1.0, -2.0], behaviour, advantage=1.0) == (0.0, [0.0, 0.0])


def test_ratio_cap() -> None:
    _, gradient = evaluate([-1.0], [-4.0], advantage=-1.0)
    assert gradient == [5.0]


def test_loss_cap_stops_value_and_gradient() -> None:
    loss, gradient = evaluate([-60.0], [-60.5], advantage=2.0)
    assert (loss, gradient) == (0.0, [0.0]), "clipped by the mean ratio"
    loss, gradient = evaluate([-60.0], [-60.0], advantage=2.0)
    assert (loss, gradient) == (100.0, [0.0])


def test_other_edges_from_config() -> None:
    config = ObjectiveConfig(clip_low=0.9, clip_high=1.1)
    assert keeps_gradient(1.09, 1.0, config)
    assert not keeps_gradient(0.89, -1.0, config)
