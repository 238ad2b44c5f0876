import itertools
import json
import random

import pytest
from family_cases import family
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trajectory_helpers import (
    CHATML,
    QWEN_SPECIALS,
    TOOLS,
    answer_text,
    make_tokenizer,
    result,
    split_ids,
    system,
    user,
)

from gyre.chat.conversation import Conversation, Message, ToolCall
from gyre.chat.families import FAMILIES
from gyre.chat.render import ChatRenderer, RenderError

HEAD = (system("You are a helpful agent."), user("list the files"))


def test_unknown_family_and_unfit_tokenizer_are_named(tokenizer):
    with pytest.raises(RenderError, match="Unknown model family 'gpt9'"):
        ChatRenderer(tokenizer, "gpt9", thinking=False)
    with pytest.raises(RenderError, match="does not fit model family 'llama3'"):
        ChatRenderer(tokenizer, "llama3", thinking=False)
    assert "qwen3" in FAMILIES


def test_T03_golden_qwen3(renderer, tokenizer):
    call = ToolCall("c", "Bash", {"command": "ls"})
    messages = (*HEAD, Message(role="assistant", text="go", tool_calls=(call,)), result(call, "a b"))
    rendered = tokenizer.decode(renderer.render(Conversation(messages)))
    assert rendered == (
        "<|im_start|>system\nYou are a helpful agent.<|im_end|>\n<|im_start|>user\nlist the files<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\ngo\n"
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_several_calls_of_a_turn_render_for_llama3():
    renderer, tokenizer = family("llama3")
    calls = (ToolCall("c1", "Bash", {"command": "a"}), ToolCall("c2", "Bash", {"command": "b"}))
    turn = Message(role="assistant", text="both", tool_calls=calls)
    text = tokenizer.decode(renderer.render(Conversation((*HEAD, turn, result(calls[0], "1"), result(calls[1], "2")))))
    assert text.count('"name": "Bash"') == 2


def test_default_bridge_equals_the_template(tokenizer):
    renderer, tokenizer = family("default")
    reply = Message(role="assistant", text="yes")
    foreign = Message(role="assistant", text="canned")
    conversation = Conversation((*HEAD, reply, foreign, user("more")))
    prompt = renderer.render(Conversation(HEAD))
    sampled = tokenizer.encode("yes<|im_end|>", add_special_tokens=False)
    bridged = renderer.bridge(prompt, sampled, conversation, 3)
    assert prompt + sampled + bridged == renderer.render(conversation)
    cut = renderer.bridge(prompt, sampled[:-1], conversation, 3)
    assert cut == [tokenizer.eos_token_id, *bridged]


def test_T06_the_opened_think_belongs_to_the_prompt():
    renderer, tokenizer = family("qwen35", thinking=True)
    prompt = renderer.render(Conversation(HEAD))
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    ids = tokenizer.encode("so be it\n</think>\n\nyes<|im_end|>", add_special_tokens=False)
    turn = renderer.parse(ids)
    assert (turn.reasoning, turn.text) == ("so be it", "yes")
    reply = Message(role="assistant", text=turn.text, reasoning=turn.reasoning)
    longer = Conversation((*HEAD, reply, result("x", "r")))
    bridged = renderer.bridge(prompt, ids, longer, 3)
    assert tokenizer.decode(prompt + ids + bridged).count("<think>") == 2  # one per generation prompt


def test_T09_string_arguments_become_a_mapping(renderer):
    def conversation(arguments):
        call = ToolCall("c", "Bash", arguments)
        return Conversation((*HEAD, Message(role="assistant", tool_calls=(call,)), result(call, "r")), TOOLS)

    assert renderer.render(conversation('{"command": "ls"}')) == renderer.render(conversation({"command": "ls"}))
    assert renderer.render(conversation("{oops")) == renderer.render(conversation({"raw": "{oops"}))


def test_T09_a_template_failure_is_an_error_not_another_prompt():
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = make_tokenizer((), CHATML)
    renderer = ChatRenderer(tokenizer, "default", thinking=False)
    broken = make_tokenizer((), template + "x")
    renderer._renderer._tokenizer = broken
    with pytest.raises(RenderError, match="roles must alternate"):
        renderer.render(Conversation(HEAD))


def test_tools_as_text_for_templates_without_tools(tokenizer):
    tokenizer = make_tokenizer((), CHATML)
    renderer = ChatRenderer(tokenizer, "text_tools", thinking=False)
    prompt = renderer.render(Conversation(HEAD, TOOLS))
    assert '<tools>\n{"name": "Bash"' in tokenizer.decode(prompt)
    sampled = tokenizer.encode(answer_text("go", (("Bash", {"command": "ls"}),)) + "<|im_end|>")
    turn = renderer.parse(sampled, TOOLS)
    assert (turn.text, turn.good_calls[0].arguments) == ("go", {"command": "ls"})
    call = ToolCall("c1", "Bash", {"command": "ls"})
    reply = Message(role="assistant", text="go", tool_calls=(call,))
    longer = Conversation((*HEAD, reply, result(call, "a"), result("c2", "b"), user("next")), TOOLS)
    bridged = renderer.bridge(prompt, sampled, longer, 3)
    assert prompt + sampled + bridged == renderer.render(longer)
    assert tokenizer.decode(bridged).startswith(
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>"
    )
    for broken in ("<tool_call>{oops</tool_call>", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name":'):
        turn = renderer.parse(tokenizer.encode("well " + broken), TOOLS)
        assert (turn.text, turn.flags) == ("well " + broken, ["unparsed_tool_call"])


def chunked(ids, cuts):
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


PIECES = st.lists(
    st.sampled_from(
        [
            "hello ", " é", "😀", "\n", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>",
            '\n{"name": "Bash", "arguments": {"command": "ls"}}\n', '{"name": "Edit", "arguments": "{}"}', '{"a": ',
            "<tool_call>\n" + '{"name": "Bash", "arguments": {}}' + "\n</tool_call>", "<tool_response>", "�",
        ]
    ),
    max_size=10,
)  # fmt: skip


@settings(max_examples=150)
@example(pieces=["<think>", "hello ", "<tool_call>", "</think>"], cuts=[2], canonical=False, thinking=False)
@given(pieces=PIECES, cuts=st.lists(st.integers(0, 400), max_size=12), canonical=st.booleans(), thinking=st.booleans())
def test_stream_deltas_concatenate_to_the_parse(
    renderer, thinking_renderer, tokenizer, pieces, cuts, canonical, thinking
):
    renderer = thinking_renderer if thinking else renderer
    text = "".join(pieces)
    ids = tokenizer.encode(text, add_special_tokens=False) if canonical else split_ids(tokenizer, text)
    whole = renderer.parse(ids, TOOLS)
    stream = renderer.stream(TOOLS)
    deltas = [stream.feed(chunk) for chunk in chunked(ids, cuts)] + [stream.finish()]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
    assert stream.turn == whole
    if any(call.ok for call in whole.calls):
        assert "<tool_call>" not in whole.text


@settings(max_examples=100)
@given(st.data())
def test_parse_agrees_with_the_library_on_well_formed_turns(thinking_renderer, tokenizer, data):
    words = st.text(alphabet="ab c\né😀", max_size=12)
    calls = tuple(
        ("Bash", {"command": data.draw(words), "n": data.draw(st.integers(-5, 5))})
        for _ in range(data.draw(st.integers(0, 3)))
    )
    text = answer_text(data.draw(words), calls, reasoning=data.draw(words))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ours, library = thinking_renderer.parse(ids, TOOLS), thinking_renderer._renderer.parse_response(ids)
    assert (ours.reasoning, ours.text) == ((library.reasoning_content or "").strip(), library.content.strip())
    assert [(call.name, call.arguments) for call in ours.good_calls] == list(calls)


def test_streaming_is_prompt_and_never_shows_half_a_character(renderer, tokenizer):
    ids = tokenizer.encode("hello 😀 there", add_special_tokens=False)
    stream = renderer.stream()
    shown = [stream.feed([token]).text for token in ids]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in shown)
    assert "".join(shown) == "hello 😀 there"
    assert len([piece for piece in shown if piece]) > 2


def test_random_tokens_never_break_the_parser(renderer, thinking_renderer, tokenizer):
    rng = random.Random(0)
    specials = [tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIALS]
    for _ in range(200):
        ids = [rng.choice(specials) if rng.random() < 0.2 else rng.randrange(len(tokenizer)) for _ in range(40)]
        for one in (renderer, thinking_renderer):
            turn = one.parse(ids, TOOLS)
            json.dumps([turn.text, turn.reasoning])


ODD_ARGUMENTS = pytest.mark.parametrize(
    "arguments",
    [
        '{"a": ' + "9" * 5000 + "}",
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"a": ' + "[" * 70 + "]" * 70 + "}",
        r'{"a": "\ud83d"}',
        r'{"\ud83d": 1}',
    ],
    ids=["endless number", "endless brackets", "too deep for requests", "half a surrogate pair", "half a pair as key"],
)


@ODD_ARGUMENTS
def test_T18_a_call_that_no_harness_can_be_given_is_text(renderer, tokenizer, arguments):
    """JSON parsers refuse some of these with other errors than those of syntax; others parse and cannot be sent."""
    sampled = f'<tool_call>\n{{"name": "Bash", "arguments": {arguments}}}\n</tool_call>'
    turn = renderer.parse(tokenizer.encode(sampled, add_special_tokens=False), TOOLS)
    assert turn.good_calls == ()
    assert turn.flags == ["unparsed_tool_call"]
    assert turn.text == sampled


@ODD_ARGUMENTS
def test_a_foreign_call_that_no_template_can_write_is_rendered_as_text(renderer, tokenizer, arguments):
    """Histories that a harness brings along may hold any text where the arguments of a call belong."""
    call = Message(role="assistant", tool_calls=(ToolCall("c1", "Bash", arguments),))
    result = Message(role="tool", text="out", tool_call_id="c1")
    ids = renderer.render(Conversation((Message(role="user", text="go"), call, result), TOOLS))
    assert json.dumps({"raw": arguments}) in tokenizer.decode(ids)
