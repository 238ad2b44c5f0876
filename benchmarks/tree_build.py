"""How long does a trajectory tree take to build, and what does it keep?

    python benchmarks/tree_build.py [--json OUT]

Two scenarios, both with a harness that re-serialises every tool call:
  drift   200 turns, 12k-token system prompt, 60 sampled + 150 tool tokens a turn (notes/peers.md §E)
  xlong   1,050 calls: a main agent, ten sub-agents, three compactions; about 700k tokens processed by the policy

Text is made of words that are one token each, so sizes are exact. Times are one thread, medians over the named calls.
"""

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gyre.core.records import RoleClass
from gyre.trajectory.admission import admit
from gyre.trajectory.conversation import Conversation, Message, Tool, ToolCall
from gyre.trajectory.render import ChatRenderer
from gyre.trajectory.rows import build_row
from gyre.trajectory.tree import Sample, TrajectoryTree

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
            "</tool_response>", "<think>", "</think>"]  # fmt: skip
TOOLS = (Tool("Bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}}),)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, plus the words " w0" … " w999" as single tokens."""
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in (f"Ġw{i}" for i in range(1000)):
        left = word[0]
        for symbol in word[1:]:
            if left + symbol not in vocab:
                vocab[left + symbol] = len(vocab)
                merges.append((left, symbol))
            left += symbol
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")


class Agent:
    """One agent of a scripted execution: each step asks the policy once and appends a rewritten echo and a result."""

    def __init__(self, run: "Run", system: str, task: str, role: RoleClass, agent_id: str = "") -> None:
        self.run, self.role, self.agent_id = run, role, agent_id
        self.messages = (Message(role="system", text=system), Message(role="user", text=task))

    def step(self, sampled: int, observed: int) -> None:
        emitted = self.run.call(self.messages, self.role, self.agent_id, sampled, tool=True)
        call = emitted.tool_calls[0]
        echo = Message(
            role="assistant",
            text=emitted.text.strip(),
            tool_calls=(ToolCall(call.id, call.name, json.dumps(call.arguments, indent=1)),),
        )
        result = Message(role="tool", text=self.run.words(observed), tool_call_id=call.id)
        self.messages = (*self.messages, echo, result)

    def compact(self, sampled: int) -> None:
        instruction = Message(role="user", text="CRITICAL: Respond with TEXT ONLY")
        role = RoleClass.MAIN_SUMMARY if self.role is RoleClass.MAIN else RoleClass.SUB_AGENT_SUMMARY
        summary = self.run.call((*self.messages[:-2], instruction), role, self.agent_id, sampled, tool=False)
        self.messages = (self.messages[0], Message(role="user", text=summary.text), *self.messages[-2:])


class Run:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.tree = TrajectoryTree("bench", ChatRenderer(tokenizer, "qwen3", thinking=False))
        self.random = random.Random(0)
        self.prepare_ms: list[float] = []
        self.commit_ms: list[float] = []
        self.prompt_tokens: list[int] = []

    def words(self, count: int) -> str:
        return "".join(f" w{self.random.randrange(1000)}" for _ in range(count))

    def call(
        self, messages: tuple[Message, ...], role: RoleClass, agent_id: str, sampled: int, *, tool: bool
    ) -> Message:
        number = len(self.tree)
        started = time.perf_counter()
        prepared = self.tree.prepare(Conversation(messages, TOOLS), role=role, agent_id=agent_id)
        self.prepare_ms.append((time.perf_counter() - started) * 1e3)
        text = self.words(sampled - 1)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        calls = (ToolCall(f"call_{number}", "Bash", {"command": "ls", "n": 1.0}),) if tool else ()
        emitted = Message(role="assistant", text=text.strip() + "\n", tool_calls=calls)
        sample = Sample(output_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids), finish="stop")
        started = time.perf_counter()
        self.tree.commit(prepared, sample, emitted, call_id=f"c{number}")
        self.commit_ms.append((time.perf_counter() - started) * 1e3)
        self.prompt_tokens.append(len(prepared.input_ids))
        return emitted


def drift(run: Run) -> None:
    agent = Agent(run, run.words(12_000), run.words(50), RoleClass.MAIN)
    for _ in range(200):
        agent.step(60, 150)


def xlong(run: Run) -> None:
    main = Agent(run, run.words(20_000), run.words(200), RoleClass.MAIN)
    for phase in range(4):
        for _ in range(150):
            main.step(300, 500)
        if phase < 3:
            main.compact(800)
    for index in range(10):
        sub = Agent(run, run.words(4_000), run.words(100), RoleClass.SUB_AGENT, f"a{index}")
        for _ in range(45):
            sub.step(200, 300)


def measure(name: str, scenario: Any, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    run = Run(tokenizer)
    started = time.perf_counter()
    scenario(run)
    wall = time.perf_counter() - started
    tree = run.tree
    started = time.perf_counter()
    admitted = admit(tree, j_max=None, seed=0)
    rows = [build_row(tree, path) for path in admitted]
    build = time.perf_counter() - started
    tenth = max(1, len(run.prepare_ms) // 10)
    by_length = sorted(zip(run.prompt_tokens, run.prepare_ms, strict=True))
    return {
        "scenario": name,
        "calls": len(tree),
        "longest_prompt": max(run.prompt_tokens),
        "prompt_tokens_sent": sum(run.prompt_tokens),
        "unique_tokens": tree.unique_tokens,
        "leaves": len(tree.leaves()),
        "rows": len(rows),
        "targets": sum(len(row.targets) for row in rows),
        "sampled_tokens": sum(node.output_len for node in tree.nodes),
        "row_tokens": sum(len(row.ids_T) for row in rows),
        "prepare_ms_shortest_tenth": statistics.median(ms for _, ms in by_length[:tenth]),
        "prepare_ms_longest_tenth": statistics.median(ms for _, ms in by_length[-tenth:]),
        "commit_ms": statistics.median(run.commit_ms),
        "record_seconds": (sum(run.prepare_ms) + sum(run.commit_ms)) / 1e3,
        "admit_and_rows_seconds": build,
        "wall_seconds": wall,
    }


def memory(scenario: Any, tokenizer: PreTrainedTokenizerFast) -> float:
    """MiB that a finished tree holds (Python allocations, texts of the conversation included)."""
    tracemalloc.start()
    run = Run(tokenizer)
    scenario(run)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--memory", action="store_true", help="measure memory too (slow: traces every allocation)")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    results = []
    for name, scenario in (("drift", drift), ("xlong", xlong)):
        result = measure(name, scenario, tokenizer)
        if arguments.memory:
            result["held_mib"] = memory(scenario, tokenizer)
        results.append(result)
        for key, value in result.items():
            print(f"{key:28} {value:,.3f}" if isinstance(value, float) else f"{key:28} {value}")
        print()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
