"""Every model family: prompts continue exactly what was sampled (cases T02, T03, T07)."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from family_cases import KINDS, REAL, encode, family, reasons, sampled_text, stop_before
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trajectory_helpers import FAMILY_SPECIALS, TOOLS, result, system, user

from gyre.chat.conversation import Conversation, Message, ToolCall
from gyre.chat.families import FAMILIES
from gyre.core.records import RoleClass
from gyre.trajectory.call import Sample
from gyre.trajectory.tree import TrajectoryTree

HEAD = (system("You are a helpful agent."), user("list the files"))
WORDS = ("here ", "and there", " é", "😀", "\n", "a < b", "<tool", "{", '"name": ', "yes and no", "0 1 2")
PROPERTY = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

REWRITTEN = {
    (name, True) for name in ("qwen3", "qwen35", "glm45", "kimi_k2", "kimi_k25", "deepseek_r1", "minimax_m2", "gpt_oss")
}
"""(family, reasons): templates that write a past turn with reasoning otherwise than it was sampled. Only what follows
such a turn can be compared with a whole render."""


GOLDEN = json.loads((Path(__file__).parent / "family_prompts.json").read_text())
"""Family → the prompt of a conversation with a call, its result and a second question, from the first question on."""


def test_every_family_is_under_test():
    assert set(FAMILY_SPECIALS) == set(FAMILIES) == set(GOLDEN)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_T03_golden_prompt(name, kind):
    renderer, tokenizer = family(name, kind, thinking=True)
    call = ToolCall("c1", "Bash", {"command": "ls"})
    messages = (
        system("S"),
        user("USER"),
        Message(role="assistant", reasoning="hm", tool_calls=(call,)),
        result(call, "a b"),
        Message(role="assistant", text="two files", reasoning="so"),
        user("NEXT"),
    )
    text = tokenizer.decode(renderer.render(Conversation(messages)))
    assert text[text.index("USER") :] == GOLDEN[name]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_real_tokenizers_match_the_template_that_they_come_with(name):
    """Text turns; the library's own checks cover the rest of a template."""
    if not (REAL / name / "tokenizer.json").exists():
        pytest.skip(f"no real tokenizer of {name}: run scripts/tokenizers.sh")
    renderer, tokenizer = family(name, "real", thinking=True)
    messages = (*HEAD, Message(role="assistant", text="go"), user("é😀 next"))
    wire = [{"role": message.role, "content": message.text} for message in messages]
    ids = tokenizer.apply_chat_template(wire, add_generation_prompt=True, return_dict=False)
    assert renderer.render(Conversation(messages)) == ids


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_T02_prompt_output_and_bridge_are_the_whole_render(name, kind, thinking):
    renderer, tokenizer = family(name, kind, thinking)
    thinks = reasons(name, thinking)
    prompt = renderer.render(Conversation(HEAD))
    sampled = encode(tokenizer, sampled_text(name, thinking, "here and there", "hm"))
    reply = Message(role="assistant", text="here and there", reasoning="hm" if thinks else "")
    longer = Conversation((*HEAD, reply, user("and the next one")))
    whole = renderer.render(longer)
    stop = stop_before(name, tokenizer, "user")
    bridge = renderer.bridge(prompt, [*sampled, stop], longer, 3)
    assert bridge
    assert whole[-len(bridge) :] == bridge
    if (name, thinks) not in REWRITTEN:
        assert [*prompt, *sampled, stop, *bridge] == whole
    for other in renderer.stop_token_ids:  # a policy may end with any of them
        assert renderer.bridge(prompt, [*sampled, other], longer, 3) in (bridge, [stop, *bridge])


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("name", "kind"), KINDS)
@PROPERTY
@given(data=st.data())
def test_T02_T07_stored_tokens_and_the_encoded_suffix_are_the_prompt(name, kind, thinking, data):
    """Any number of turns, tokenised as oddly as the policy likes: every sampled id is in every later prompt, the turn
    boundary is there once, and what follows it is what the template writes."""
    renderer, tokenizer = family(name, kind, thinking)
    tree = TrajectoryTree("e1", renderer)
    conversation, path = Conversation(HEAD, TOOLS), []
    for turn in range(data.draw(st.integers(2, 4), label="turns")):
        prepared = tree.prepare(conversation, role=RoleClass.MAIN)
        prompt = prepared.input_ids
        suffix = prompt[len(path) :]
        assert prompt[: len(path)] == path
        assert "prefix_break" not in prepared.flags
        if path:
            whole = renderer.render(conversation)
            closing = 0 if path[-1] in renderer.stop_token_ids else 1
            assert whole[len(whole) - len(suffix) + closing :] == suffix[closing:]
            boundary = path[-1:] + suffix
            assert [t in (*renderer.stop_token_ids, *ends(tokenizer)) for t in boundary[:2]] == (
                [False, True] if closing else [True, False]
            )
        words = "".join(data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5), label="words"))
        text = sampled_text(name, thinking, "so " + words.strip(), "hm " + words.replace("<", ""))
        output = odd_ids(tokenizer, text, data.draw(st.integers(0, 3), label="cuts"))
        follows = user(f"next {turn}")
        if data.draw(st.booleans(), label="ended"):
            output = [*output, stop_before(name, tokenizer, "user")]
        emitted = renderer.parse(output, TOOLS)
        assert not emitted.calls
        reply = Message(role="assistant", text=emitted.text, reasoning=emitted.reasoning)
        sample = Sample(output_ids=output, logprobs=[-0.1] * len(output), versions=[0] * len(output), finish="stop")
        tree.commit(prepared, sample, reply, call_id=f"c{turn}")
        path = prompt + output
        conversation = Conversation((*conversation.messages, reply, follows), TOOLS)
    assert len(tree.leaves()) == 1
    assert tree.unique_tokens == len(path)


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k25"])
def test_a_result_has_the_id_that_the_policy_gave_its_call(name):
    """Also after a call that could not be read, and from a policy that counts in its own way. A whole render has no
    more than the calls that could be read, and counts those."""
    renderer, tokenizer = family(name)

    def attempt(call_id: str, arguments: str) -> str:
        return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

    attempts = [
        attempt("functions.Bash:0", '{"command": '),
        attempt("functions.Bash:1", '{"command": "ls"}'),
        attempt("functions.Edit:7", '{"file_path": "a"}'),
    ]
    section = f"go<|tool_calls_section_begin|>{''.join(attempts)}<|tool_calls_section_end|><|im_end|>"
    output = encode(tokenizer, section)
    turn = renderer.parse(output, TOOLS)
    assert [call.ok for call in turn.calls] == [False, True, True]
    calls = tuple(ToolCall(f"c{i}", call.name, call.arguments) for i, call in enumerate(turn.good_calls))
    reply = Message(role="assistant", text=turn.text, tool_calls=calls)
    messages = (*HEAD, reply, result(calls[1], "edited"), result(calls[0], "a b"))
    longer = Conversation(messages, TOOLS)

    def returned(ids: list[int]) -> list[str]:
        return [part.partition("\n")[0] for part in tokenizer.decode(ids).split("## Return of ")[1:]]

    prompt = renderer.render(Conversation(HEAD, TOOLS))
    assert returned(renderer.bridge(prompt, output, longer, 3)) == ["functions.Edit:7", "functions.Bash:1"]
    foreign = Conversation((*messages, Message(role="assistant", text="not sampled here"), user("next")), TOOLS)
    assert returned(renderer.bridge(prompt, output, foreign, 3)) == ["functions.Edit:7", "functions.Bash:1"]
    assert returned(renderer.render(longer)) == ["functions.Edit:1", "functions.Bash:0"]
    dropped = Conversation(
        (*HEAD, msgspec.structs.replace(reply, tool_calls=calls[:1]), result(calls[0], "a b")), TOOLS
    )
    assert returned(renderer.bridge(prompt, output, dropped, 3)) == ["functions.Bash:0"]


def ends(tokenizer) -> list[int]:
    """gpt-oss closes a cut message with a token at which it does not stop."""
    token = tokenizer.convert_tokens_to_ids("<|end|>")
    return [token] if isinstance(token, int) else []


def odd_ids(tokenizer, text: str, cuts: int) -> list[int]:
    """Ids that decode to the text; with cuts, other ones than the tokenizer gives. Special tokens stay whole."""
    ids = encode(tokenizer, text)
    if not cuts:
        return ids
    special = set(tokenizer.added_tokens_decoder)
    odd: list[int] = []
    for is_special, run in itertools.groupby(ids, key=special.__contains__):
        piece = list(run)
        if is_special:
            odd += piece
            continue
        written = tokenizer.decode(piece, clean_up_tokenization_spaces=False)
        for start in range(0, len(written), cuts):
            odd += encode(tokenizer, written[start : start + cuts])
    return odd


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_T02_new_messages_of_every_kind_bridge_like_a_whole_render(name, kind):
    """Tool results, system messages inside the history (Claude Code), assistant turns that were not sampled here."""
    renderer, tokenizer = family(name, kind)
    call = ToolCall("c1", "Bash", {"command": "ls"})
    turn = Message(role="assistant", text="go", tool_calls=(call,), reasoning="hm" if reasons(name, False) else "")
    prompt = renderer.render(Conversation(HEAD, TOOLS))
    output = encode(tokenizer, sampled_text(name, False, "go", "hm"))
    canned = Message(role="assistant", text="canned")
    for new in ((result(call, "1"),), (result(call, "1"), system("nag")), (result(call, "1"), canned, user("x"))):
        conversation = Conversation((*HEAD, turn, *new), TOOLS)
        whole = renderer.render(conversation)
        assert all(message.text in tokenizer.decode(whole) for message in new)  # no template drops one silently
        bridges = [renderer.bridge(prompt, [*output, stop], conversation, 3) for stop in renderer.stop_token_ids]
        assert any(bridge and bridge == whole[-len(bridge) :] for bridge in bridges)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_two_system_prompts_before_the_task_are_written_in_order(name, kind):
    """Codex sends two; Llama 3 wants its tools in the message after the first."""
    renderer, tokenizer = family(name, kind)
    messages = (system("first prompt"), system("second prompt"), user("the task"))
    written = tokenizer.decode(renderer.render(Conversation(messages, TOOLS)))
    places = [written.index(message.text) for message in messages]
    assert places == sorted(places)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_T02_a_turn_that_ends_inside_its_reasoning_is_continued(name, kind, ended):
    """Cut by a limit, or ended by the policy itself."""
    renderer, tokenizer = family(name, kind, thinking=True)
    tree = TrajectoryTree("e1", renderer)
    first = tree.prepare(Conversation(HEAD), role=RoleClass.MAIN)
    output = encode(tokenizer, sampled_text(name, True, "", "hm and").partition("hm and")[0] + "hm and")
    output += [stop_before(name, tokenizer, "user")] if ended else []
    turn = renderer.parse(output)
    emitted = Message(role="assistant", text=turn.text, reasoning=turn.reasoning)
    sample = Sample(output_ids=output, logprobs=[-0.1] * len(output), versions=[0] * len(output), finish="length")
    tree.commit(first, sample, emitted, call_id="c0")
    longer = Conversation((*HEAD, emitted, user("go on")))
    then = tree.prepare(longer, role=RoleClass.MAIN)
    stored = first.input_ids + output
    assert then.flags == []
    assert then.input_ids[: len(stored)] == stored


@pytest.mark.skipif(not (REAL / "gpt_oss").exists(), reason="no real tokenizer: run scripts/tokenizers.sh")
@pytest.mark.parametrize("said", ["hm", "hm<|end|><|start|>assistant<|channel|>final<|message|>ok"])
def test_a_message_of_gpt_oss_that_was_cut_at_its_end_is_closed_once(said):
    renderer, tokenizer = family("gpt_oss", "real")
    prompt = renderer.render(Conversation(HEAD))
    turn = Message(role="assistant", text="ok")
    foreign = Message(role="assistant", text="mine")
    for new in ((user("next"),), (foreign, user("next"))):
        longer = Conversation((*HEAD, turn, *new))
        cut, closed = (renderer.bridge(prompt, encode(tokenizer, said + end), longer, 3) for end in ("", "<|end|>"))
        assert cut == [tokenizer.convert_tokens_to_ids("<|end|>"), *closed]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_whatever_follows_a_turn_continues_it(name, kind):
    """Roles in any order: a system prompt that comes late, turns of others, results of other calls, nothing at all."""
    renderer, tokenizer = family(name, kind)
    first = (user("list the files"),)
    call = ToolCall("c0", "Bash", {"command": "ls"})
    other = Message(role="assistant", tool_calls=(ToolCall("c1", "Bash", {"command": "pwd"}),))
    follow = [system("late"), user("next"), Message(role="assistant", text="mine"), other, result(call, "out")]
    for turn in (Message(role="assistant", text="ok"), Message(role="assistant", tool_calls=(call,))):
        tree = TrajectoryTree("e", renderer)
        prepared = tree.prepare(Conversation(first, TOOLS), role=RoleClass.MAIN)
        ids = [*encode(tokenizer, "ok"), renderer.stop_token_ids[0]]
        sample = Sample(output_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), finish="stop")
        tree.commit(prepared, sample, turn, call_id="a")
        for length in range(3):
            for after in itertools.product(follow, repeat=length):
                longer = tree.prepare(Conversation((*first, turn, *after), TOOLS), role=RoleClass.MAIN)
                assert (longer.parent, "prefix_break" in longer.flags) == ("a", False), after
                assert longer.input_ids[: len(prepared.input_ids) + len(ids)] == [*prepared.input_ids, *ids], after
