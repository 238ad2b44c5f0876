from hypothesis import given
from hypothesis import strategies as st

from gyre.core.text import storable


@given(st.text(st.characters(codec=None)))
def test_any_text_becomes_text_that_utf_8_can_hold(text):
    assert storable(text).encode().decode() == storable(text)


def test_text_that_can_be_stored_stays_as_it_is_and_the_rest_is_shown():
    assert storable("größer 😀\n") == "größer 😀\n"
    assert storable("a\ud800b") == "a\\ud800b"
    assert storable("abcdef", 3) == "abc…"
