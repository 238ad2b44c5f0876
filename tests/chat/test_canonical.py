"""One case per row of the mutation table (docs/harnesses.md): the echo is the same turn, and drift says how."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.chat.canonical import (
    canonical_arguments,
    canonical_value,
    drift_kinds,
    drop_billing,
    same_context,
    same_turn,
)
from gyre.chat.conversation import Message, ToolCall


def turn(arguments=None, text="", reasoning="", name="Bash", call_id="c1"):
    calls = () if arguments is None else (ToolCall(call_id, name, arguments),)
    return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=calls)


EDIT = {"file_path": "a", "old_string": "x", "new_string": "y"}
ROWS = {
    "args whitespace": (turn({"a": 1}), turn('{ "a":1 }\n'), {"args_form": 1}),
    "escapes decoded": (turn({"a": "é/😀"}), turn('{"a": "\\u00e9\\/\\ud83d\\ude00"}'), {"args_form": 1}),
    "float to integer": (turn({"a": 10000.0, "b": 2e3, "c": -0.0}), turn({"a": 10000, "b": 2000, "c": 0}),
                         {"args_form": 1}),
    "big integer": (turn({"a": 12345678901234567890}), turn({"a": 12345678901234567000}), {"args_form": 1}),
    "overflow to null": (turn({"a": float("inf")}), turn({"a": None}), {"args_form": 1}),
    "integer-like keys move": (turn({"b": 1, "10": 1, "2": 1}), turn({"2": 1, "10": 1, "b": 1}), {"args_form": 1}),
    "duplicate keys": (turn('{"a": 1, "a": 2}'), turn({"a": 2}), {"args_form": 1}),
    "key order": (turn(EDIT), turn(dict(reversed(EDIT.items()))), {"args_form": 1}),
    "defaults added first": (turn(EDIT), turn({"replace_all": False, **EDIT}), {"args_default_added": 1}),
    "string coerced": (turn({"a": "10000"}), turn({"a": 10000}), {"args_changed": 1}),
    "content edited": (turn({"command": "cd /w && ls"}), turn({"command": "ls"}), {"args_changed": 1}),
    "invalid JSON wrapped": (turn("{oops"), turn({"__unparsedToolInput": {"raw": "{oops"}}), {"args_changed": 1}),
    "arguments unparsed": (turn({"a": 1}), turn("{oops"), {"args_unparsed": 1}),
    "tool renamed": (turn({"a": 1}), turn({"a": 1}, name="invalid"), {"call_renamed": 1}),
    "text whitespace": (turn(text=" hi\n"), turn(text="hi"), {"text_whitespace": 1}),
    "blank text before a tool": (turn({}, text="\n"), turn({}), {"text_whitespace": 1}),
    "text of a tool turn dropped": (turn({}, text="hi"), turn({}), {"text_dropped": 1}),
    "text after a call moved": (turn({}, text="one"), turn({}, text="one  after "), {"text_changed": 1}),
    "thinking becomes text": (turn({}, reasoning="hm"), turn({}, text="hm"),
                              {"text_added": 1, "reasoning_dropped": 1}),
    "reasoning trimmed": (turn(text="a", reasoning=" hm "), turn(text="a", reasoning="hm"),
                          {"reasoning_whitespace": 1}),
    "reasoning dropped": (turn(text="a", reasoning="hm"), turn(text="a"), {"reasoning_dropped": 1}),
    "reasoning rewritten": (turn(text="a", reasoning="hm"), turn(text="a", reasoning="summary"),
                            {"reasoning_changed": 1}),
    "unchanged": (turn({"a": [1, {"b": None}]}, text="t"), turn({"a": [1, {"b": None}]}, text="t"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_mutation_table(name):
    emitted, echoed, kinds = ROWS[name]
    assert same_turn(emitted, echoed)
    assert drift_kinds(emitted, echoed) == kinds


def test_turns_that_are_not_the_same():
    two = Message(role="assistant", tool_calls=(ToolCall("c1", "Bash", {}), ToolCall("c2", "Bash", {})))
    one = msgspec.structs.replace(two, tool_calls=two.tool_calls[:1])
    assert not same_turn(two, one)
    assert drift_kinds(two, one) == {"call_dropped": 1}
    assert drift_kinds(one, two) == {"call_added": 1}
    swapped = msgspec.structs.replace(two, tool_calls=two.tool_calls[::-1])
    assert same_turn(two, swapped)
    assert drift_kinds(two, swapped) == {"call_order": 1}
    assert not same_turn(turn({}), turn({}, call_id="other"))
    assert not same_turn(turn(text="a"), turn(text="b"))


def test_context_messages_compare_by_content():
    stored = Message(role="tool", text="out\n", tool_call_id="c1")
    assert same_context(stored, msgspec.structs.replace(stored, text="out"))
    assert not same_context(stored, msgspec.structs.replace(stored, tool_call_id="c2"))
    assert not same_context(stored, Message(role="user", text="out"))
    assert same_context(turn({"a": 1.0}, call_id="x"), turn('{"a":1}', call_id="y"))


def test_true_is_not_one():
    assert canonical_arguments({"a": True}) != canonical_arguments({"a": 1})
    assert canonical_arguments({"a": "1"}) != canonical_arguments({"a": 1})


@pytest.mark.parametrize("depth", [100, 900, 5000])
def test_arguments_nested_too_deep_are_text(depth):
    deep = "[" * depth + "]" * depth
    assert canonical_arguments(deep) == json.dumps(deep)
    assert canonical_arguments("[" * depth) == json.dumps("[" * depth)


def test_billing_block_is_dropped():
    blocks = ["x-anthropic-billing-header: cc_version=2.1.220.abc; cc_entrypoint=sdk-cli;", "You are", "a helper"]
    assert drop_billing(blocks) == ["You are", "a helper"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_canonical_form_is_stable(value):
    once = canonical_value(value)
    assert canonical_value(once) == once
    arguments = {"v": value}
    assert canonical_arguments(canonical_arguments(arguments)) == canonical_arguments(arguments)
