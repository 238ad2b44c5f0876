"""Setbacks in a row wait longer and longer, and end the run only when nothing gets on for a long time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.control.setbacks import RecoverySection, Setbacks
from gyre.core.errors import GyreError

LIMITS = RecoverySection(futile_failures=3, futile_s=100.0, pause_s=8.0)


def test_the_first_setback_waits_for_nothing_and_the_next_ones_double():
    setbacks = Setbacks(LIMITS)
    assert [setbacks.note("a", "", 0.0, 0) for _ in range(8)] == [0, 1, 2, 4, 8, 8, 8, 8]
    assert setbacks.note("b", "", 0.0, 0) == 0, "each name has its own row"
    assert setbacks.note("a", "", 0.0, 1) == 0, "progress ends a row"


@given(st.lists(st.tuples(st.floats(0, 60), st.booleans()), max_size=60))
def test_the_run_is_given_up_only_after_many_setbacks_over_a_long_time_without_progress(steps):
    setbacks, now, progress = Setbacks(LIMITS), 0.0, 0
    row: list[float] = []
    for seconds, got_on in steps:
        now += seconds
        if got_on:
            progress += 1
            row = []
        row.append(now)
        hopeless = len(row) > LIMITS.futile_failures and now - row[0] >= LIMITS.futile_s
        if hopeless:
            with pytest.raises(GyreError, match=rf"^x was lost {len(row)} times .* last: gone; "):
                setbacks.note("x", "gone", now, progress)
            return
        assert setbacks.note("x", "gone", now, progress) <= LIMITS.pause_s
