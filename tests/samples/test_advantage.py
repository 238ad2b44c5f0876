import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.records import Outcome, Validity
from gyre.samples.advantage import group_advantages, mean_reward


def outcome(i, reward, validity=Validity.VALID):
    return Outcome(execution_id=f"g-{i}", validity=validity, reward=reward, cause="completed")


@given(st.lists(st.integers(0, 100).map(lambda n: n / 100), min_size=2, max_size=16))
def test_against_the_formula(rewards):
    advantages = group_advantages([outcome(i, r) for i, r in enumerate(rewards)])
    if len(set(rewards)) == 1:
        assert set(advantages.values()) == {0.0}
        return
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert list(advantages.values()) == pytest.approx([(r - mean) / deviation for r in rewards])


def test_unresolved_is_out_of_loss_and_statistics():
    advantages = group_advantages([outcome(0, 1.0), outcome(1, 0.0), outcome(2, 99.0, Validity.UNRESOLVED)])
    assert advantages == {"g-0": 1.0, "g-1": -1.0, "g-2": None}


def test_no_work_counts_as_zero_reward_whatever_it_says():
    advantages = group_advantages([outcome(0, 1.0), outcome(1, 7.0, Validity.NO_WORK)])
    assert advantages == {"g-0": 1.0, "g-1": -1.0}


def test_equal_rewards_up_to_rounding_have_no_advantage():
    assert set(group_advantages([outcome(0, 0.1 + 0.2), outcome(1, 0.3)]).values()) == {0.0}
    assert group_advantages([outcome(0, 0.4)]) == {"g-0": 0.0}
    assert group_advantages([outcome(0, 0.4, Validity.UNRESOLVED)]) == {"g-0": None}


@given(
    st.lists(st.floats(-1, 1).filter(lambda r: r == 0 or abs(r) > 1e-6), min_size=2, max_size=9),
    st.integers(-1000, 1000),
)
def test_advantages_do_not_depend_on_the_unit_of_the_rewards(rewards, exponent):
    unit = group_advantages([outcome(i, r) for i, r in enumerate(rewards)])
    scaled = group_advantages([outcome(i, math.ldexp(r, exponent)) for i, r in enumerate(rewards)])
    assert scaled == unit


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_any_finite_rewards_have_finite_advantages_of_mean_zero(rewards):
    outcomes = [outcome(i, r) for i, r in enumerate(rewards)]
    advantages = list(group_advantages(outcomes).values())
    assert all(math.isfinite(a) for a in advantages)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6 * len(rewards))
    assert min(rewards) <= mean_reward(outcomes) <= max(rewards)


@pytest.mark.parametrize("rewards", [[0, 1e200], [5e-324, 0], [1.7e308, -1.7e308], [1e-300, 1e300], [0, 1e-12]])
def test_two_different_rewards_are_one_standard_deviation_off_whatever_their_size(rewards):
    low, high = sorted(range(2), key=rewards.__getitem__)
    assert group_advantages([outcome(i, r) for i, r in enumerate(rewards)]) == {f"g-{low}": -1.0, f"g-{high}": 1.0}


def test_rewards_that_differ_by_rounding_alone_are_equal_at_every_size():
    for size in (1e-300, 1.0, 1e300):
        assert set(group_advantages([outcome(0, (0.1 + 0.2) * size), outcome(1, 0.3 * size)]).values()) == {0.0}


def test_a_stored_reward_that_is_no_finite_number_excludes_its_execution():
    stored = [outcome(0, math.nan), outcome(1, math.inf), outcome(2, 1.0), outcome(3, 0.0)]
    assert group_advantages(stored) == {"g-0": None, "g-1": None, "g-2": 1.0, "g-3": -1.0}
    assert mean_reward(stored) == 0.5
