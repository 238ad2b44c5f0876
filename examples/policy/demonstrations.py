"""Demonstrations for the tiny policy: random small jobs of the example families, done by an imperfect scripted agent.

A job is an instruction with a list of items, each settled by one shell command. The agent looks first where it must
(SPEC.md, the failing tests), then takes the items in order. Before every command it draws one of two variants, the
right one with probability `Habits.right`, and after every command it goes on with probability `Habits.go_on`, else it
declares the job done. These two habits are what reinforcement learning is left to improve.

Everything is drawn from the passed generator; no harness text is stored here (see capture.py).
"""

import json
import random
import re
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from gyre.chat.conversation import Conversation, Message, Tool, ToolCall

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent learns that the job is done."""

WORDS = {name: text.split() for name, text in tomllib.loads((Path(__file__).parent / "words.toml").read_text()).items()}
ARGUMENTS = ["ab", "wh", "xy", "nm", "pq", "uv", "st", "cd"]
RESULTS = {"+": 5, "-": -1, "*": 6}
"""Of an operator on (2, 3), the case that run_tests.py tries."""


ResultForm = Literal["claude", "json", "raw"]
"""How a tool result is shown: Claude Code's way, mini-swe-agent's default way, or the output as it is."""

JOB_MARK, DATE_MARK, MACHINE_MARK = "JOB-GOES-HERE", "DATE-GOES-HERE", "MACHINE-GOES-HERE"


class Habits(msgspec.Struct, frozen=True):
    """Probabilities of the demonstrating agent."""

    right: float = 0.55
    """Takes the right variant of a command."""
    go_on: float = 0.5
    """Goes on to the next item instead of declaring the job done."""


class Action(msgspec.Struct, frozen=True):
    command: str
    output: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    instruction: str
    look: Action | None = None
    """Taken first, always."""
    items: tuple[tuple[Action, Action], ...]
    """Right and wrong variant for each item, in order."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness presents a job and ends a run, with its own words as captured (or short ones of ours)."""

    first: Conversation
    """First request of a run whose job was `JOB_MARK`."""
    results: ResultForm
    submits: bool
    """The run ends with the SUBMIT command; otherwise with a plain answer."""


TASKS = Path(__file__).parents[1] / "tasks"
COUNTS = (2, 3, 3, 3, 4)
"""How many items a job may have; the example tasks have three."""


def job(rng: random.Random, counts: Sequence[int] = COUNTS) -> Job:
    return rng.choice([_settings, _counts, _modules, _repairs])(rng, rng.choice(counts))


def _settings(rng: random.Random, count: int) -> Job:
    folder = rng.choice(WORDS["folders"])
    pairs = list(zip(rng.sample(WORDS["keys"], count), rng.sample(WORDS["values"], count), strict=True))
    return Job(
        instruction="Write each value to its file, so that the file holds only that value:\n"
        + "".join(f"- {value} to {folder}/{key}\n" for key, value in pairs),
        items=tuple(_written(f"echo {value}", f"{folder}/{key}") for key, value in pairs),
    )


def _counts(rng: random.Random, count: int) -> Job:
    log = rng.choice(WORDS["logs"]) + ".log"
    pairs = list(zip(rng.sample(WORDS["counts"], count), rng.sample(WORDS["words"], count), strict=True))
    return Job(
        instruction=f"Count the lines of {log} that contain each word. Write the count to the file, so that the file "
        "holds only that count:\n" + "".join(f"- {word} to {name}.txt\n" for name, word in pairs),
        items=tuple(_written(f"grep -c {word} {log}", f"{name}.txt") for name, word in pairs),
    )


def _written(source: str, path: str) -> tuple[Action, Action]:
    """The file exists: appending leaves its old line in place."""
    return Action(f"{source} > {path}"), Action(f"{source} >> {path}")


def _modules(rng: random.Random, count: int) -> Job:
    a, b = rng.choice(ARGUMENTS)
    spec, items = f"# {rng.choice(WORDS['topics'])}\n", []
    for name in rng.sample(WORDS["functions"], count):
        body = " ".join((*rng.choice([(a, "+", b), (a, "*", b), (a, "-", b), (b, "-", a)]),))
        spec += f"- {name}({a}, {b}) returns {body}\n"
        head = f"echo 'def {name}({a}, {b}):"
        items.append((Action(f"{head} return {body}' > {name}.py"), Action(f"{head} {body}' > {name}.py")))
    return Job(
        instruction="Write the Python functions that SPEC.md describes, each into a module of its own name.\n",
        look=Action("cat SPEC.md", spec),
        items=tuple(items),
    )


def _repairs(rng: random.Random, count: int) -> Job:
    a, b = rng.choice(ARGUMENTS)
    report, items = "", []
    for name in rng.sample(WORDS["functions"], count):
        bad, good = rng.sample(list(RESULTS), 2)
        report += f"FAIL {name}(2, 3) gave {RESULTS[bad]}, want {RESULTS[good]}\n"
        edit = f"'s/{bad}/{good}/' {name}.py"
        shown = f"def {name}({a}, {b}): return {a} {good} {b}\n"
        items.append((Action(f"sed -i {edit}"), Action(f"sed {edit}", shown)))
    return Job(
        instruction="Repair the modules so that all tests pass. Run them with: python3 run_tests.py\n",
        look=Action("python3 run_tests.py", report + f"0 of {count} pass\n"),
        items=tuple(items),
    )


def example_job(task: Path) -> Job:
    """The job of an example task, read from its files; the right commands are those of its solution."""
    workspace = task / "environment/workspace"
    look = None
    if (workspace / "SPEC.md").exists():
        look = Action("cat SPEC.md", (workspace / "SPEC.md").read_text())
    elif (workspace / "run_tests.py").exists():
        command = ["python3", "-B", "run_tests.py"]
        run = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=True)
        look = Action("python3 run_tests.py", run.stdout)
    rights = (task / "solution/solve.sh").read_text().splitlines()[3:]
    items = tuple((Action(right), _spoilt(right, workspace)) for right in rights)
    return Job(instruction=(task / "instruction.md").read_text(), look=look, items=items)


def _spoilt(right: str, workspace: Path) -> Action:
    """The wrong variant of a right command."""
    if right.startswith("sed -i "):
        _, bad, good, tail = right.split("/")
        return Action(right.replace(" -i", ""), (workspace / tail.split()[-1]).read_text().replace(bad, good))
    return Action(right.replace(" return", "") if " return" in right else right.replace(" > ", " >> "))


def actions(job: Job, habits: Habits, rng: random.Random) -> Iterator[Action]:
    """What the imperfect agent does before it declares the job done."""
    if job.look:
        yield job.look
    for index, (right, wrong) in enumerate(job.items):
        if index and rng.random() >= habits.go_on:
            return
        yield right if rng.random() < habits.right else wrong


def demonstration(job: Job, habits: Habits, frame: Frame, rng: random.Random) -> Conversation:
    """The whole conversation of one run, from the harness's first message to the final answer."""
    tool = next(tool.name for tool in frame.first.tools if tool.name.lower() == "bash")
    messages = list(framed(frame, job.instruction, rng).messages)
    for turn, action in enumerate(actions(job, habits, rng)):
        messages += _turn(tool, f"call_{turn}", action.command)
        messages.append(Message(role="tool", text=result(frame.results, action.output), tool_call_id=f"call_{turn}"))
    if frame.submits:
        messages += _turn(tool, "call_end", SUBMIT)
    else:
        messages.append(Message(role="assistant", text="Done."))
    return Conversation(tuple(messages), frame.first.tools)


def _turn(tool: str, call_id: str, command: str) -> list[Message]:
    return [Message(role="assistant", tool_calls=(ToolCall(call_id, tool, {"command": command}),))]


def framed(frame: Frame, instruction: str, rng: random.Random) -> Conversation:
    """The first request for a job; what changes from day to day and from machine to machine is drawn at random."""
    if rng.random() < 0.5:
        instruction = instruction.rstrip("\n")
    kernel = f"{rng.randint(5, 7)}.{rng.randint(0, 20)}.{rng.randint(0, 99)}"
    drawn = {
        JOB_MARK: instruction,
        DATE_MARK: f"20{rng.randint(25, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        MACHINE_MARK: f"Linux {kernel} #{rng.randint(1, 99)} SMP x86_64",
    }
    return _replaced(frame.first, drawn)


def result(form: ResultForm, output: str) -> str:
    """The text of a tool result in a harness's own form."""
    if form == "claude":
        return output.rstrip("\n") or "(Bash completed with no output)"
    if form == "json":
        return json.dumps({"returncode": 0, "output": output}, indent=2, ensure_ascii=False)
    return output


def captured_frame(requests: list[Conversation], outputs: list[str]) -> Frame:
    """The frame of a captured run, `outputs` being what its commands printed.

    Raises ValueError when the harness shows results in none of the known forms."""
    shown = [message.text for message in requests[-1].messages if message.role == "tool"]
    for form in get_args(ResultForm):
        if shown == [result(form, output) for output in outputs]:
            break
    else:
        raise ValueError(f"The captured tool results {shown} have no known form; add it to `result`.")
    messages = tuple(
        msgspec.structs.replace(
            message,
            text=re.sub(r"Linux \S+ .* x86_64", MACHINE_MARK, re.sub(r"20\d\d-\d\d-\d\d", DATE_MARK, message.text)),
        )
        for message in requests[0].messages
    )
    first = Conversation(messages, requests[0].tools)
    return Frame(first=first, results=form, submits=any(tool.name == "bash" for tool in first.tools))


def prompted(frame: Frame, rng: random.Random) -> Frame:
    """The frame with another system prompt and perhaps only the shell tool, so that the policy depends on neither."""
    first = _replaced(frame.first, {SYSTEM_PROMPTS[0]: rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.4:
        first = Conversation(first.messages, tuple(tool for tool in first.tools if tool.name.lower() == "bash"))
    return msgspec.structs.replace(frame, first=first)


def _replaced(conversation: Conversation, texts: dict[str, str]) -> Conversation:
    messages = []
    for message in conversation.messages:
        text = message.text
        for known, drawn in texts.items():
            text = text.replace(known, drawn)
        messages.append(msgspec.structs.replace(message, text=text))
    return Conversation(tuple(messages), conversation.tools)


SYSTEM_PROMPTS = [
    "You are a coding agent.",
    "You are a helpful agent that works with a shell.",
    "You are a careful agent. Use the tools.",
    "Do the job with shell commands.",
]


def short_frame(rng: random.Random) -> Frame:
    """A frame with a prompt of a few words, for the first part of the fit, where it costs little."""
    name = rng.choice(["Bash", "bash"])
    shell = Tool(name, "", {"type": "object", "properties": {"command": {"type": "string"}}})
    system = Message(role="system", text=rng.choice(SYSTEM_PROMPTS))
    first = Conversation((system, Message(role="user", text=JOB_MARK)), (shell,))
    form: ResultForm = "claude" if name == "Bash" else rng.choice(["raw", "json"])
    return Frame(first=first, results=form, submits=name == "bash")
