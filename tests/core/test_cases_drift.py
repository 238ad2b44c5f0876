"""Trainer and engine drift apart: ratio histograms and the alarm on the slope (T27)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.drift import RATIO_EDGES, RISE, WINDOW, gap_rise, merged, ratio_histograms


def test_T27_the_alarm_rings_on_the_slope_of_the_reported_run():
    """0.011 → 0.036 within a few steps; noise around a level is no alarm, nor is a level that falls."""
    rising = [0.011 + 0.025 * i / 9 for i in range(10)]
    assert gap_rise(rising) == pytest.approx(0.025 * (WINDOW - 1) / 9)
    assert gap_rise([0.011 + 0.001 * (-1) ** i for i in range(20)]) == 0.0
    assert gap_rise(rising[::-1]) == 0.0
    assert gap_rise([1e-5 * i for i in range(20)]) == 0.0
    assert gap_rise(rising[: WINDOW - 1]) == 0.0


@given(st.lists(st.floats(0, 1), min_size=WINDOW, max_size=30))
def test_T27_the_rise_is_that_of_the_last_window(gaps):
    rise = gap_rise(gaps)
    assert rise == gap_rise(gaps[-WINDOW:])
    assert rise == 0.0 or rise > RISE


def test_T27_ratios_are_counted_per_weight_version():
    histograms = ratio_histograms([1.0, 1.005, 1.0051, 0.4, 7.0, 1.0], [3, 3, 3, 4, 4, 4])
    middle = RATIO_EDGES.index(1.005)
    assert histograms[3][middle : middle + 2] == [2, 1]
    assert (histograms[4][0], histograms[4][middle], histograms[4][-1]) == (1, 1, 1)
    both = merged([histograms, ratio_histograms([1.0], [4]), {}])
    assert (sum(both[3]), sum(both[4])) == (3, 4)


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(0, 3)), max_size=40), st.integers(0, 40))
def test_T27_histograms_merge_to_that_of_the_whole(items, cut):
    ratios, versions = [math.exp(x) for x, _ in items], [v for _, v in items]
    parts = [ratio_histograms(ratios[a:b], versions[a:b]) for a, b in ((0, cut), (cut, len(items)))]
    assert merged(parts) == ratio_histograms(ratios, versions)
