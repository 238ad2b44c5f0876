"""Every model family: turns are read while they are sampled, in any chunks (case T18 among them)."""

import itertools
import random

import pytest
from family_cases import KINDS, encode, family, reasons, sampled_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from trajectory_helpers import CHATML, EDIT, TOOLS, result, system, user
from transformers import PreTrainedTokenizerFast

from gyre.chat.calls.parsed_call import call_arguments
from gyre.chat.conversation import Conversation, Message, Tool, ToolCall
from gyre.chat.families import FAMILIES
from gyre.chat.render import ChatRenderer

HEAD = (system("You are a helpful agent."), user("list the files"))
UNWRITTEN = ("default", "glm45", "minimax_m2", "deepseek_r1")
"""No calls, or a template that rewrites a turn without reasoning: the turn cannot be read off a whole render."""
CALLS = [kind for kind in KINDS if getattr(kind, "values", kind)[0] not in UNWRITTEN]
ODD = (
    "hello ", " é", "😀", "\n", "<", "</", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "{", '{"a": ',
    '\n{"name": "Bash", "arguments": {"command": "ls"}}\n', '{"name": "Bash", "parameters": {}}', "｜DSML｜", "<｜DSML",
    '<｜DSML｜invoke name="Bash">', "</｜DSML｜invoke>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>",
    "<|call|>", "assistant", "analysis", "final", "commentary", " to=functions.Bash", "<function=Bash>", "�",
)  # fmt: skip


def streamed(renderer, ids, cuts):
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    stream = renderer.stream(TOOLS)
    deltas = [stream.feed(ids[a:b]) for a, b in itertools.pairwise(edges)] + [stream.finish()]
    return stream.turn, deltas


def call_turn(name, kind, text, arguments):
    """What the family's template writes for a turn with a call: the prompt, and the turn as ids."""
    renderer, tokenizer = family(name, kind)
    call = ToolCall("c1", "Bash", arguments)
    turn = Message(role="assistant", text=text, tool_calls=(call,))
    prompt = renderer.render(Conversation(HEAD, TOOLS))
    whole = renderer.render(Conversation((*HEAD, turn, result(call, "1")), TOOLS))
    if name == "gpt_oss":  # the template leaves out the empty analysis that the prompt has opened
        start = next(i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b) - 3
        stop = tokenizer.convert_tokens_to_ids("<|call|>")
        return [tokenizer.convert_tokens_to_ids("<|end|>"), *whole[start : whole.index(stop) + 1]]
    assert whole[: len(prompt)] == prompt
    end = next(i for i in range(len(prompt), len(whole)) if whole[i] in renderer.stop_token_ids)
    return whole[len(prompt) : end + 1]


@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_calls_written_in_the_familys_own_markup_are_read_back(name, kind):
    """By us as by the library, whose boundaries ours must be on well-formed turns."""
    renderer, _ = family(name, kind)
    text = "" if name == "llama3" else "go"
    sampled = call_turn(name, kind, text, {"command": "ls -la é"})
    turn, deltas = streamed(renderer, sampled, range(len(sampled)))
    assert (turn.text, turn.reasoning, turn.flags) == (text, "", [])
    if name != "text_tools":  # ours alone
        library = renderer._renderer.parse_response(sampled, prompt_ids=renderer._opening)
        assert (library.content.strip(), library.reasoning_content or "") == (text, "")
        assert [(c.name, call_arguments(c.arguments)) for c in library.tool_calls] == [
            ("Bash", {"command": "ls -la é"})
        ]
    assert [(c.name, c.arguments) for c in turn.good_calls] == [("Bash", {"command": "ls -la é"})]
    assert "".join(delta.text for delta in deltas[:-1]) == text


@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_an_argument_is_text_where_the_tool_does_not_say_what_it_is(name, kind):
    """A schema of several types, an argument or a tool that is unknown: the tool answers, and the run goes on."""
    renderer, _ = family(name, kind)
    sampled = call_turn(name, kind, "" if name == "llama3" else "go", {"pattern": "a b"})
    either = Tool("Bash", "", {"type": "object", "properties": {"pattern": {"type": ["string", "null"]}}})
    for tools in ((either,), TOOLS, (EDIT,)):
        (call,) = renderer.parse(sampled, tools).good_calls
        assert (call.name, call.arguments) == ("Bash", {"pattern": "a b"})


@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_T18_a_call_that_was_cut_stays_policy_text(name, kind):
    renderer, tokenizer = family(name, kind)
    text = "" if name == "llama3" else "go"
    sampled = call_turn(name, kind, text, {"command": "ls -la"})
    cut = sampled[: len(sampled) - 1 - len(encode(tokenizer, "-la")) * 3]
    while renderer.parse(cut, TOOLS).good_calls:
        cut = cut[:-1]
    turn, _ = streamed(renderer, cut, [len(cut) // 2])
    assert turn.flags == ["unparsed_tool_call"]
    assert "Bash" in turn.text
    assert turn.text.startswith(text)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_text_and_reasoning_stream_as_they_are_sampled(name, kind, thinking):
    """After every token, all of its text has been shown but for what may still become a marker or whitespace."""
    renderer, tokenizer = family(name, kind, thinking)
    text = "hello there, yes: 1 < 2 and {no} é😀 here"
    ids = encode(tokenizer, sampled_text(name, thinking, text, "hm so"))
    turn, deltas = streamed(renderer, ids, range(len(ids)))
    assert (turn.text, turn.reasoning) == (text, "hm so" if reasons(name, thinking) else "")
    assert "".join(delta.text for delta in deltas[:-1]) == text
    assert sum(1 for delta in deltas if delta.text) > len(encode(tokenizer, text)) // 2
    assert all("\N{REPLACEMENT CHARACTER}" not in delta.text for delta in deltas)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("name", "kind"), KINDS)
@settings(max_examples=25)
@given(
    pieces=st.lists(st.sampled_from(ODD), max_size=9),
    cuts=st.lists(st.integers(0, 300), max_size=10),
    whole_turn=st.booleans(),
    seed=st.integers(0, 99),
)
def test_deltas_of_any_chunks_concatenate_to_the_parse(name, kind, thinking, pieces, cuts, whole_turn, seed):
    renderer, tokenizer = family(name, kind, thinking)
    ids = encode(tokenizer, "".join(pieces))
    if whole_turn and FAMILIES[name].tool_openers:  # something that looks like a call, then damaged
        ids += encode(tokenizer, FAMILIES[name].tool_openers[0] + "".join(pieces[:3]))
    if seed % 3 == 0:
        rng = random.Random(seed)
        ids += [rng.randrange(len(tokenizer)) for _ in range(6)]
    turn, deltas = streamed(renderer, ids, cuts)
    assert turn == renderer.parse(ids, TOOLS)
    assert "".join(delta.text for delta in deltas) == turn.text
    assert "".join(delta.reasoning for delta in deltas) == turn.reasoning


def counted_decode(tokenizer, monkeypatch):
    """A list that grows by the number of tokens of each decoding."""
    lengths, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **kind: lengths.append(len(ids)) or decode(ids, **kind))
    return lengths


@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_a_long_call_is_read_in_time_linear_in_its_tokens(name, kind, monkeypatch):
    """DeepSeek V4: a file of 13,000 tokens held the proxy's event loop for 19 s."""
    renderer, tokenizer = family(name, kind)
    sampled = call_turn(name, kind, "" if name == "llama3" else "go", {"command": "list the files " * 60})
    lengths = counted_decode(tokenizer, monkeypatch)
    assert renderer.parse(sampled, TOOLS).good_calls
    assert sum(lengths) < 10 * len(sampled)


def test_half_a_character_repeated_is_decoded_in_time_linear_in_its_tokens(monkeypatch):
    renderer, tokenizer = family("qwen3")
    half = encode(tokenizer, "😀")[0]
    lengths = counted_decode(tokenizer, monkeypatch)
    turn, deltas = streamed(renderer, [half] * 300, range(300))
    assert sum(lengths) < 10 * 300
    assert "".join(delta.text for delta in deltas) == turn.text == "�" * 300


def test_characters_of_byte_tokens_next_to_each_other_are_read_whole():
    """SentencePiece tokenizers (Llama 2, Mistral, Gemma) spell what they do not know as bytes, one token each."""
    pieces = [
        "<unk>",
        "<|im_start|>",
        "<|im_end|>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *map(chr, range(33, 127)),
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>", chat_template=CHATML
    )
    renderer = ChatRenderer(tokenizer, "default", thinking=False)
    ids = encode(tokenizer, "a😀éé€€z")
    for cuts in (range(len(ids)), (2, 7, 9), (8, 12)):
        assert streamed(renderer, ids, cuts)[0].text == "a😀éé€€z"
    turn, _ = streamed(renderer, [*encode(tokenizer, "€"), vocabulary["<0xFF>"], vocabulary["z"]], range(5))
    assert turn.text == "€�z"


@pytest.mark.parametrize("called", ["5", "true", '["Bash"]', '{"name": "Bash"}'])
def test_a_call_whose_name_is_no_text_stays_policy_text(called):
    renderer, tokenizer = family("llama3")
    written = f'{{"name": {called}, "parameters": {{}}}}'
    turn = renderer.parse(encode(tokenizer, written))
    assert (turn.text, turn.good_calls, turn.flags) == (written, (), ["unparsed_tool_call"])
