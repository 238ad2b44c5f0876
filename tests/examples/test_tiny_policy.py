"""The tiny policy: demonstrations solve the examples, tokens are those of serving, the weights know the form.

The shipped prompts are not needed here: the frames are our own short ones.
"""

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.chat.conversation import Conversation
from gyre.chat.render import ChatRenderer

POLICY = Path(__file__).parents[2] / "examples/policy"
sys.path.insert(0, str(POLICY))

from demonstrations import (  # noqa: E402
    TASKS,
    Habits,
    Job,
    actions,
    captured_frame,
    demonstration,
    example_job,
    framed,
    job,
    result,
    short_frame,
)

torch = pytest.importorskip("torch", reason="the training stack is not installed")

from tokens import TEMPLATE, tokens  # noqa: E402
from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: E402

EXAMPLES = sorted(path.parent for path in TASKS.glob("*/task.toml"))
PERFECT = Habits(right=1.0, go_on=1.0)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY / "tiny")


@pytest.fixture(scope="module")
def renderer(tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer, "qwen3", thinking=False)


def acted(job: Job, habits: Habits, folder: Path) -> Iterator[tuple[str, str]]:
    """Runs the demonstrated commands; yields what each was said to print and what it printed."""
    for action in actions(job, habits, random.Random(0)):
        command = ["bash", "-c", action.command]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        yield action.output, run.stdout


@pytest.mark.parametrize("task", EXAMPLES, ids=lambda task: task.name)
@pytest.mark.parametrize("right", [1.0, 0.0])
def test_the_demonstrating_agent_solves_an_example_with_good_habits_only(
    task: Path, right: float, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(task / "environment/workspace", tmp_path / "app"))
    shown = list(acted(example_job(task), Habits(right=right, go_on=1.0), folder))
    assert [told for told, _ in shown] == [printed for _, printed in shown]
    solved = Path(shutil.copytree(task / "environment/workspace", tmp_path / "solved"))
    for line in (task / "solution/solve.sh").read_text().splitlines()[3:]:
        subprocess.run(["bash", "-c", line], cwd=solved, check=True)
    files = [path.relative_to(solved) for path in solved.rglob("*") if path.is_file()]
    same = all(
        (folder / name).is_file() and (folder / name).read_text() == (solved / name).read_text() for name in files
    )
    assert same == (right == 1.0)


def test_habits_are_the_only_chance_in_a_demonstration() -> None:
    rng = random.Random(1)
    told = [list(actions(job(rng, (3,)), Habits(), rng)) for _ in range(2000)]
    looked = [len(steps) - bool(steps[0].output) for steps in told]
    assert 1.6 < sum(looked) / len(looked) < 1.9, "expected 1 + 1/2 + 1/4 items"


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_what_the_template_and_the_parser_say(seed: int, tokenizer, renderer: ChatRenderer) -> None:
    rng = random.Random(seed)
    told = demonstration(job(rng), PERFECT, short_frame(rng), rng)
    ids, sampled = tokens(told, renderer, tokenizer)
    assert tokenizer.chat_template == TEMPLATE
    wire = [{"role": message.role, "content": message.text, "tool_calls": _calls(message)} for message in told.messages]
    tools = [{"type": "function", "function": _declared(tool)} for tool in told.tools]
    text = tokenizer.apply_chat_template(wire, tools=tools, tokenize=False)
    assert tokenizer.encode(text, add_special_tokens=False)[: len(ids)] == ids
    turns = [message for message in told.messages if message.role == "assistant"]
    parsed = [renderer.parse(turn, told.tools) for turn in _sampled_turns(ids, sampled)]
    assert [turn.text for turn in parsed] == [message.text for message in turns]
    assert [[call.arguments for call in turn.calls] for turn in parsed] == [
        [call.arguments for call in message.tool_calls] for message in turns
    ]


def _calls(message) -> list[dict[str, object]]:
    return [{"function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls]


def _declared(tool) -> dict[str, object]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _sampled_turns(ids: list[int], sampled: list[bool]) -> list[list[int]]:
    turns: list[list[int]] = []
    for at, token in enumerate(ids):
        if sampled[at]:
            if not sampled[at - 1]:
                turns.append([])
            turns[-1].append(token)
    return turns


def test_a_captured_run_becomes_a_frame_and_an_unknown_form_is_refused() -> None:
    rng = random.Random(2)
    frame = short_frame(rng)
    told = demonstration(job(rng), PERFECT, frame, rng)
    outputs = ["one\n", ""]
    requests = [frame.first, Conversation(told.messages[:2], told.tools)]
    results = [message for message in told.messages if message.role == "tool"][:2]
    for form in ("claude", "json", "raw"):
        shown = tuple(
            type(message)(role="tool", text=result(form, output), tool_call_id=message.tool_call_id)
            for message, output in zip(results, outputs, strict=True)
        )
        last = Conversation((*requests[1].messages, *shown), told.tools)
        assert captured_frame([requests[0], last], outputs).results == form
    with pytest.raises(ValueError, match="no known form"):
        captured_frame([requests[0], last], ["two\n", ""])


def test_the_shipped_weights_are_small_and_ask_for_the_right_first_command(tokenizer, renderer: ChatRenderer) -> None:
    assert sum(path.stat().st_size for path in (POLICY / "tiny").iterdir()) < 8e6
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(POLICY / "tiny", dtype=torch.float32)
    rng = random.Random(3)
    for task in EXAMPLES:
        told = example_job(task)
        first = framed(short_frame(rng), told.instruction, rng)
        prompt = torch.tensor([renderer.render(first)])
        output = model.generate(prompt, max_new_tokens=48, do_sample=False, eos_token_id=renderer.stop_token_ids)
        turn = renderer.parse(output[0, prompt.shape[1] :].tolist(), first.tools)
        options = [told.look] if told.look else told.items[0]
        assert [call.name.lower() for call in turn.calls] == ["bash"]
        assert turn.calls[0].arguments["command"] in [option.command for option in options]
