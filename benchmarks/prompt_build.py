"""What does the next prompt of a conversation cost, as its history grows to 200k tokens?

    python benchmarks/prompt_build.py [--tokenizer DIR] [--tokens N] [--json OUT]

One agent reads files in a tool loop, with the real Qwen3 tokenizer (benchmarks/peers.sh). Each turn brings about 1,000
new tokens. Four ways to the prompt of the same turn, in turns, in CPU milliseconds of one thread:
  gyre        history match and prompt build: `TrajectoryTree.prepare`, from the parsed request
  flat        Gyre's prompt in one piece, as an engine is sent it (`PreparedCall.prompt`); the other ways include that
  renderers   `bridge_to_next_turn` of the renderers library with the whole previous prompt
  template    a full re-render with `apply_chat_template`, which most servers do
Beside each turn the same is measured on a history that stays short: the ratio says what the length of a history costs.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import renderers
from transformers import AutoTokenizer

from gyre.chat.conversation import Conversation, Message, Tool, ToolCall
from gyre.chat.render import ChatRenderer
from gyre.chat.wire import wire_messages, wire_tools
from gyre.core.records import RoleClass
from gyre.proxy.session.tokenizer import load_tokenizer
from gyre.trajectory.call import PreparedCall, Sample
from gyre.trajectory.tree import TrajectoryTree

TOKENIZER = Path(__file__).parents[1] / ".cache" / "peers" / "qwen3-tokenizer"
REPEATS = 3
UNMEASURED = 4
"""Turns before the first measured one; also the whole length of the short history."""
TEMPLATE_EVERY = 8
"""Turns between two full re-renders, which take most of the time."""
NAMES = ("Bash", "Read", "Write", "Edit", "Grep", "Glob", "Task", "TodoWrite")
TOOLS = tuple(
    Tool(name, f"{name}: see the manual. " * 20, {"type": "object", "properties": {"argument": {"type": "string"}}})
    for name in NAMES
)


def source_text() -> Iterator[str]:
    """Eight pieces of Python's own library, about 800 tokens each, over and over: all turns encode alike."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    return itertools.cycle([path.read_text()[start : start + 3_000] for start in range(6_000, 30_000, 3_000)])


def milliseconds(function: Callable[[], Any]) -> float:
    started = time.process_time()
    function()
    return (time.process_time() - started) * 1e3


class Loop:
    """One agent's conversation, its tree, and the time of each way at each turn."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.tree = TrajectoryTree("bench", ChatRenderer(load_tokenizer(str(directory)), "qwen3", thinking=False))
        config = type(renderers.config_from_name("qwen3"))(enable_thinking=False, thinking_retention="all")
        self.renderer = renderers.create_renderer(tokenizer, config)
        self.text = source_text()
        system = "".join(next(self.text) for _ in range(7))
        self.messages = (Message(role="system", text=system), Message(role="user", text="Read the library."))
        self.previous: tuple[list[int], list[int]] = ([], [])
        self.turns: list[dict[str, float]] = []

    def prepare(self) -> PreparedCall:
        # What the proxy read before is the same object again (gyre/proxy/dialects/memo.py).
        return self.tree.prepare(Conversation(self.messages, TOOLS), role=RoleClass.MAIN)

    def turn(self, short: "Loop | None" = None) -> None:
        """Answers one call; measures before that when it is given a loop with a short history to compare with."""
        number = len(self.turns)
        prepared = self.prepare()
        times: dict[str, float] = {"tokens": prepared.input_len}
        if short is not None:
            gyre, at_start, flat, bridge = [], [], [], []
            for _ in range(REPEATS):
                gyre.append(milliseconds(self.prepare))
                at_start.append(milliseconds(short.prepare))
                flat.append(milliseconds(lambda: prepared.prompt))
                bridge.append(milliseconds(self.bridge))
            times |= {"gyre": min(gyre), "flat": min(flat), "renderers": min(bridge)}
            times["growth"] = min(gyre) / min(at_start)
            if number % TEMPLATE_EVERY == 0:
                times["template"] = milliseconds(self.template)
            assert self.bridge() == prepared.input_ids
        self.turns.append(times)
        self.answer(prepared, number)

    def bridge(self) -> list[int]:
        new = wire_messages(self.messages, len(self.messages) - 1)
        bridged = self.renderer.bridge_to_next_turn(*self.previous, new, tools=wire_tools(TOOLS))
        assert bridged is not None
        ids: list[int] = bridged.token_ids
        return ids

    def template(self) -> Any:
        return self.tokenizer.apply_chat_template(
            wire_messages(self.messages, 0), tools=wire_tools(TOOLS), add_generation_prompt=True,
            enable_thinking=False, return_dict=False,
        )  # fmt: skip

    def answer(self, prepared: PreparedCall, number: int) -> None:
        """The policy calls a tool; the harness echoes the call spelled its way, and adds the result."""
        call = ToolCall(f"call_{number}", "Read", {"argument": f"file{number}.py", "limit": 2000.0})
        thought = next(self.text)[:600]
        spelled = json.dumps({"name": call.name, "arguments": call.arguments})
        ids = self.tokenizer.encode(f"{thought}\n<tool_call>\n{spelled}\n</tool_call><|im_end|>")
        emitted = Message(role="assistant", text=thought.strip() + "\n", tool_calls=(call,))
        sample = Sample(output_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids), finish="stop")
        self.tree.commit(prepared, sample, emitted, call_id=f"c{number}")
        self.previous = (prepared.input_ids, ids)
        again = ToolCall(call.id, call.name, {"limit": 2000, "argument": f"file{number}.py"})
        echo = Message(role="assistant", text=thought.strip(), tool_calls=(again,))
        result = Message(role="tool", text=next(self.text), tool_call_id=call.id)
        self.messages = (*self.messages, echo, result)


def summarise(turns: list[dict[str, float]]) -> list[dict[str, float]]:
    """Medians over each tenth of the turns."""
    size = len(turns) // 10
    tenths = []
    for start in range(0, size * 10, size):
        part = turns[start : start + size]
        keys = ("tokens", "gyre", "flat", "renderers", "template", "growth")
        found = {key: [turn[key] for turn in part if key in turn] for key in keys}
        tenths.append({key: statistics.median(values) for key, values in found.items() if values})
    return tenths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--tokens", type=int, default=200_000, help="length of the longest prompt")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    loop, short = Loop(arguments.tokenizer), Loop(arguments.tokenizer)
    for _ in range(UNMEASURED):
        loop.turn()
        short.turn()
    while loop.turns[-1]["tokens"] < arguments.tokens:
        loop.turn(short)
    tenths = summarise(loop.turns[UNMEASURED:])
    last = tenths[-1]
    ratios = {key: last[key] / last["gyre"] for key in ("renderers", "template")}
    print("| tokens | gyre ms | flat ms | renderers ms | template ms | gyre ÷ gyre on a short history |")
    print("|---|---|---|---|---|---|")
    for tenth in tenths:
        print(f"| {tenth['tokens']:,.0f} | " + " | ".join(f"{tenth[key]:.2f}" for key in list(tenth)[1:]) + " |")
    print("last tenth, ÷ gyre: " + ", ".join(f"{key} {value:.1f}" for key, value in ratios.items()))
    if arguments.json:
        results = {"turns": len(loop.turns), "tenths": tenths, "ratio_to_gyre_in_last_tenth": ratios}
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
