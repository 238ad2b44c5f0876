import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.records import Outcome, Validity
from gyre.trajectory.advantage import group_advantages


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
