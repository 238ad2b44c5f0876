"""The arguments that a harness is given are what the policy wrote, in every family (values are code, blanks, tags)."""

import itertools
import re

import pytest
from family_cases import KINDS, encode, family, sampled_text
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_helpers import result, system, user

from gyre.chat.calls.markup import TagMarkup
from gyre.chat.calls.schema_values import value_of
from gyre.chat.conversation import Conversation, Message, Tool, ToolCall
from gyre.chat.families import FAMILIES

HEAD = (system("You are a helpful agent."), user("list the files"))
WRITING = [kind for kind in KINDS if getattr(kind, "values", kind)[0] != "default"]
TAGGED = [kind for kind in WRITING if isinstance(FAMILIES[getattr(kind, "values", kind)[0]].markup, TagMarkup)]
TEXT = {"type": "string"}
EDIT = Tool("Edit", "Edits.", {"type": "object", "properties": {"old": TEXT, "new": TEXT}})

CLOSING = (
    "</parameter>", "</function>", "</tool_call>", "</arg_value>", "</arg_key>", "</invoke>", "</minimax:tool_call>",
    "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>", "<|tool_call_end|>", "<｜tool▁call▁end｜>",
)  # fmt: skip
OPENING = (
    "<tool_call>", "<function=Bash>", "<parameter=old>", "<parameter=x>", "<arg_key>old</arg_key>", "<arg_value>",
    '<invoke name="Bash">', '<parameter name="new">', '<｜DSML｜invoke name="Bash">',
    '<｜DSML｜parameter name="old" string="true">', "<minimax:tool_call>", "<|tool_call_begin|>", "<think>", "</think>",
)  # fmt: skip
CODE = (
    "    ", "\t", "\n", "\n\n", "\r\n", " ", "if x:", "return 1", "a < b > c", '{"a": [1, "b"]}', "é", "😀", "'", '"',
    "\\", "\\n", "```", "]]>", "&lt;", "5", "true", "None", "null", "NaN", "<parameter=", "</param", "\u2028", "\x00",
)  # fmt: skip


def texts(*pieces: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=7).map("".join)


def written(name: str, kind: str, calls: list[dict], tools: tuple[Tool, ...]) -> list[int]:
    """What the family's own template writes for a turn with these calls, as ids without an end."""
    renderer, tokenizer = family(name, kind)
    made = tuple(ToolCall(f"c{i}", tools[0].name, arguments) for i, arguments in enumerate(calls))
    if name == "gpt_oss":  # the template leaves out the empty analysis that the prompt has opened
        prompt = renderer.render(Conversation(HEAD, tools))
        turn = Message(role="assistant", tool_calls=made)
        whole = renderer.render(Conversation((*HEAD, turn, result(made[0], "1")), tools))
        start = next(i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b) - 3
        stop = tokenizer.convert_tokens_to_ids("<|call|>")
        return [tokenizer.convert_tokens_to_ids("<|end|>"), *whole[start : whole.index(stop) + 1]]
    head = len(renderer._call(renderer._wire(HEAD, 0), tools, generation_prompt=False))
    turn = Message(role="assistant", tool_calls=made)
    ids = renderer._call(renderer._wire((*HEAD, turn), 0), tools, generation_prompt=False)[head:]
    ids = ids[: max((i for i, token in enumerate(ids) if token in renderer.stop_token_ids), default=len(ids))]
    if name == "llama3":
        header = tokenizer.convert_tokens_to_ids("<|end_header_id|>")
        return ids[ids.index(header) + 1 :]
    text = tokenizer.decode(ids)
    opener = FAMILIES[name].tool_openers[0]
    section = opener + text.partition(opener)[2]
    assert text.count(opener) >= 1
    return encode(tokenizer, sampled_text(name, False, section, "hm"))


def read(name: str, kind: str, ids: list[int], tools: tuple[Tool, ...], cuts: tuple[int, ...] = ()):
    renderer, _ = family(name, kind)
    ids = ids if ids[-1] in renderer.stop_token_ids else [*ids, renderer.stop_token_ids[0]]
    turn = renderer.parse(ids, tools)
    stream = renderer.stream(tools)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        stream.feed(ids[start:end])
    stream.finish()
    assert stream.turn == turn
    return turn


@pytest.mark.parametrize(("name", "kind"), WRITING)
@settings(max_examples=60)
@given(
    values=st.lists(st.fixed_dictionaries({"old": texts(*CODE), "new": texts(*CODE)}), min_size=1, max_size=2),
    cuts=st.tuples(st.integers(0, 400), st.integers(0, 400)),
)
def test_code_reaches_the_harness_as_it_was_written(name, kind, values, cuts):
    calls = values[:1] if FAMILIES[name].single_call or name == "gpt_oss" else values
    turn = read(name, kind, written(name, kind, calls, (EDIT,)), (EDIT,), cuts)
    assert [call.arguments for call in turn.good_calls] == calls
    assert turn.flags == []


@pytest.mark.parametrize(("name", "kind"), WRITING)
@settings(max_examples=60)
@given(values=st.fixed_dictionaries({"old": texts(*CODE, *CLOSING), "new": texts(*CODE, *CLOSING)}))
def test_a_value_may_hold_closing_tags(name, kind, values):
    ids = written(name, kind, [values], (EDIT,))
    turn = read(name, kind, ids, (EDIT,))
    if any(_ends_itself(name, value) for value in values.values()):
        return
    read_as = [call.arguments for call in turn.good_calls]
    # The beginning of an opening tag and what follows it may be one.
    opens = any("<parameter=" in value for value in values.values())
    assert read_as == [values] or (opens and read_as == [] and turn.flags)


def _ends_itself(name: str, value: str) -> bool:
    """Whether a value spells the tag that ends it and then, but for blanks, another tag."""
    markup = FAMILIES[name].markup
    return isinstance(markup, TagMarkup) and bool(re.search(rf"{markup.value_close}\s*<", value))


@pytest.mark.parametrize(("name", "kind"), TAGGED)
@settings(max_examples=150)
@given(values=st.fixed_dictionaries({key: texts(*CODE[:6], *CLOSING, *OPENING) for key in ("old", "new")}))
def test_a_call_that_cannot_be_told_apart_is_flagged(name, kind, values):
    """Any tags in any order. Only a value that spells its own end and, right after it, the next value is read as two:
    that is the markup's own meaning."""
    turn = read(name, kind, written(name, kind, [values], (EDIT,)), (EDIT,))
    if any(_ends_itself(name, value) for value in values.values()):
        return
    given_to_the_harness = [call.arguments for call in turn.good_calls]
    assert given_to_the_harness == [values] or turn.flags == ["unparsed_tool_call"]
    assert given_to_the_harness in ([values], [])


@pytest.mark.parametrize("name", ["qwen35", "minimax_m2", "deepseek_v4"])
def test_a_tag_is_no_name(name):
    """`<parameter=` before a closing tag opens nothing."""
    broken = {"qwen35": "<parameter=", "minimax_m2": '<parameter name="', "deepseek_v4": '<｜DSML｜parameter name="'}
    close = FAMILIES[name].markup.value_close
    values = {"old": "", "new": f"{close}{broken[name]}{close}"}
    turn = read(name, "synthetic", written(name, "synthetic", [values], (EDIT,)), (EDIT,))
    assert [call.arguments for call in turn.good_calls] == [values]


@pytest.mark.parametrize(("name", "kind"), TAGGED)
def test_a_value_may_be_a_whole_call(name, kind):
    """A policy that writes a parser's tests, or the documentation of its own tools."""
    _, tokenizer = family(name, kind)
    example = tokenizer.decode(written(name, kind, [{"old": "a\n  b", "new": "c"}], (EDIT,)))
    values = {"old": f"see:\n{example}\nand so on", "new": example}
    turn = read(name, kind, written(name, kind, [values], (EDIT,)), (EDIT,))
    assert [call.arguments for call in turn.good_calls] == [values]


def tagged(name: str, arguments: dict[str, str]) -> str:
    """A call as a policy of the family may write it."""
    if name.startswith("glm"):
        values = "\n".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in arguments.items())
        return f"<tool_call>Edit\n{values}\n</tool_call>"
    if name == "minimax_m2":
        values = "\n".join(f'<parameter name="{k}">{v}</parameter>' for k, v in arguments.items())
        return f'<minimax:tool_call>\n<invoke name="Edit">\n{values}\n</invoke>\n</minimax:tool_call>'
    if name == "deepseek_v4":
        values = "\n".join(
            f'<｜DSML｜parameter name="{k}" string="true">{v}</｜DSML｜parameter>' for k, v in arguments.items()
        )
        return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="Edit">\n{values}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function=Edit>\n{values}</function>\n</tool_call>"


def turn_of(name: str, kind: str, section: str, tools: tuple[Tool, ...] = (EDIT,)):
    _, tokenizer = family(name, kind)
    return read(name, kind, encode(tokenizer, sampled_text(name, False, section, "hm")), tools)


@pytest.mark.parametrize(("name", "kind"), TAGGED)
def test_a_value_that_spells_a_whole_end_and_goes_on_is_flagged(name, kind):
    """The first end is followed by the rest of the value and by a second one."""
    end = tagged(name, {"old": "CUT"}).partition("CUT")[2]
    turn = turn_of(name, kind, tagged(name, {"old": f"a{end} b", "new": "second"}))
    assert (turn.good_calls, turn.flags) == ((), ["unparsed_tool_call"])
    assert turn.text.endswith(tagged(name, {"old": f"a{end} b", "new": "second"}))


@pytest.mark.parametrize(("name", "kind"), TAGGED)
def test_an_argument_given_twice_is_flagged(name, kind):
    turn = turn_of(name, kind, tagged(name, {"old": "a", "new": "b"}).replace("new", "old"))
    assert (turn.good_calls, turn.flags) == ((), ["unparsed_tool_call"])


@pytest.mark.parametrize(("name", "kind"), TAGGED)
def test_a_call_after_which_the_turn_was_cut_still_counts(name, kind):
    whole, second = tagged(name, {"old": "a", "new": " b "}), tagged(name, {"old": "c", "new": "d"})
    turn = turn_of(name, kind, whole + "\n" + second[: second.index("d") + 1])
    assert [call.arguments for call in turn.good_calls] == [{"old": "a", "new": " b "}]
    assert turn.flags == ["unparsed_tool_call"]


ANY = {"properties": {"x": {}}}
READINGS = [
    ({"type": "string"}, " 5 ", " 5 "),
    ({"type": "string"}, "null", "null"),
    ({"type": ["string"]}, '"a"', '"a"'),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, " false\n", False),
    ({"type": "integer"}, "140.0", 140),
    ({"type": "integer"}, "NaN", "NaN"),
    ({"type": "integer"}, "5 apples ", "5 apples "),
    ({"type": "integer"}, "[1]", [1]),
    ({"type": "number"}, "1e400", "1e400"),
    ({"type": "number"}, "7", 7),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, " null!", " null!"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, " five", " five"),
    ({"anyOf": [{"type": "array"}, {"type": "string"}]}, '{"a": 1}', '{"a": 1}'),
    ({"enum": ["a", "1"]}, "1", "1"),
    ({"enum": ["a", 1]}, "1", 1),
    ({"const": "true"}, "true", "true"),
    ({"$ref": "#/$defs/flag"}, "true", True),
    ({"$ref": "#/$defs/word"}, "true", "true"),
    ({"$ref": "#/$defs/loop"}, "true", True),
    ({"$ref": "#/nowhere"}, " a", " a"),
    ({"type": "object"}, '{"a": " b "}', {"a": " b "}),
    ({"type": 7, "anyOf": "odd"}, "5", 5),
    ("odd", "5", 5),
    ({}, " text ", " text "),
    ({}, '"quoted"', '"quoted"'),
    ({}, "[1, 2]", [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), READINGS)
def test_a_value_has_the_type_that_the_schema_names(schema, text, value):
    definitions = {"flag": {"type": "boolean"}, "word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    read_as = value_of(text, {"properties": {"x": schema}, "$defs": definitions}, "x")
    assert (read_as, type(read_as)) == (value, type(value))


@pytest.mark.parametrize(
    ("schema", "said", "text", "value"),
    [
        ({}, "text", "5", "5"),
        ({}, "json", "5", 5),
        ({"type": "integer"}, "text", "5", 5),
        ({"type": "string"}, "json", '"a"', "a"),
        ({"type": "string"}, "json", "a ", "a "),
    ],
)
def test_what_the_markup_says_of_a_value_counts_where_the_schema_is_silent(schema, said, text, value):
    assert value_of(text, {"properties": {"x": schema}}, "x", said=said) == value


@pytest.mark.parametrize(("name", "kind"), TAGGED)
def test_types_round_trip_through_the_template(name, kind):
    kinds = {
        "flag": "boolean",
        "count": "integer",
        "share": "number",
        "many": "array",
        "map": "object",
        "word": "string",
    }
    tool = Tool("Edit", "", {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}})
    arguments = {"flag": True, "count": -3, "share": 0.5, "many": [1, " a "], "map": {"k": "</parameter>"}, "word": "5"}
    (call,) = read(name, kind, written(name, kind, [arguments], (tool,)), (tool,)).good_calls
    assert call.arguments == arguments


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("name", ["qwen3", "kimi_k2", "deepseek_v3", "llama3", "text_tools"])
def test_a_number_that_json_cannot_write_is_flagged(name, number):
    """A harness was sent null instead."""
    ids = written(name, "synthetic", [{"old": "HERE", "new": "b"}], (EDIT,))
    _, tokenizer = family(name)
    ids = encode(tokenizer, tokenizer.decode(ids).replace('"HERE"', number))
    turn = read(name, "synthetic", ids, (EDIT,))
    assert (turn.good_calls, turn.flags) == ((), ["unparsed_tool_call"])


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "glm45", "minimax_m2", "kimi_k2", "deepseek_v3"])
def test_a_tag_spelled_with_ordinary_tokens_is_text(name):
    """Tags are tokens here: the same characters in other tokens end nothing."""
    _, tokenizer = family(name)
    spelled = {}
    for tag in FAMILIES[name].markup.tags:
        token = tokenizer.convert_tokens_to_ids(tag)
        assert isinstance(token, int), tag
        spelled[token] = [i for letter in tag for i in encode(tokenizer, letter)]
    values = {"old": f"x {' y '.join(FAMILIES[name].markup.tags)}\n", "new": "END"}
    ids = written(name, "synthetic", [values], (EDIT,))
    marks = [i for i, token in enumerate(ids) if token in spelled]
    own = len([i for i in written(name, "synthetic", [{"old": "", "new": "END"}], (EDIT,)) if i in spelled])
    inside = marks[_first_inside(name) :][: len(marks) - own]
    odd = [i for at, token in enumerate(ids) for i in (spelled[token] if at in inside else [token])]
    turn = read(name, "synthetic", odd, (EDIT,))
    assert [call.arguments for call in turn.good_calls] == [values]
    assert len(odd) > len(ids)


def _first_inside(name: str) -> int:
    """How many tag tokens stand before the first value."""
    return {"glm45": 4, "kimi_k2": 2, "deepseek_v3": 2}.get(name, 1)


@pytest.mark.parametrize(("name", "kind"), TAGGED)
def test_a_call_with_two_whole_readings_is_flagged(name, kind):
    """One value opens a tag and the next closes it: they may be two values, or one that holds a value of its own."""
    opening, closing = (tagged(name, {"old": "CUT"}).partition(at)[2] for at in ("Edit", "CUT"))
    opening, closing = opening.partition("CUT")[0].lstrip('">\n').rstrip("\n"), closing.strip("\n").partition("\n")[0]
    turn = turn_of(name, kind, tagged(name, {"old": f"see {opening}", "new": f"{closing} tail"}))
    assert (turn.good_calls, turn.flags) == ((), ["unparsed_tool_call"])
    turn = turn_of(name, kind, tagged(name, {"old": "see", "new": f"{opening} tail"}))
    assert [call.arguments for call in turn.good_calls] == [{"old": "see", "new": f"{opening} tail"}]
