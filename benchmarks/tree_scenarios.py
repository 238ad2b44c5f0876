"""Executions that the builders of tree_build.py record: messages with their token ids, and the calls over them.

A rendered message is its `ids`; a prompt is its messages' ids and then HEADER, after which the policy samples. What it
sampled is `output`; the `ids` of an assistant message are what a re-rendering of the history makes of it, which in
"drift" lacks two tokens (as when thinking is dropped or JSON is spaced differently).
"""

import json
import random
from typing import Any

HEADER = [1, 2, 3]
EOS = 0
WORDS = range(10, 150_000)


class Script:
    """Collects one execution. Every word is one token, so sizes are exact."""

    def __init__(self, name: str, *, drift: bool, rewrite: bool = False) -> None:
        self.name, self.drift, self.rewrite = name, drift, rewrite
        self.messages: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self._random = random.Random(0)

    def message(self, role: str, words: int, **fields: Any) -> int:
        ids = [self._random.choice(WORDS) for _ in range(words)]
        text = " ".join(f"w{token}" for token in ids)
        self.messages.append({"role": role, "text": text, "ids": ids, **fields})
        return len(self.messages) - 1

    def call(self, agent: str, role: str, messages: list[int], words: int, *, tool: bool, orphan: bool = False) -> int:
        """The index of the answer, as the harness will send it back."""
        number = len(self.calls)
        ids = [self._random.choice(WORDS) for _ in range(words - 1)]
        text = " ".join(f"w{token}" for token in ids)
        calls = [{"id": f"call_{number}", "name": "Bash", "arguments": {"command": f"ls {number}", "n": 1.0}}]
        emitted = {"text": text + "\n", "tool_calls": calls if tool else []}
        echo = emitted
        if self.rewrite:
            spelled = json.dumps({"n": 1, "command": f"ls {number}"}, indent=1)
            echo = {"text": text, "tool_calls": [{**c, "arguments": spelled} for c in emitted["tool_calls"]]}
        rendered = HEADER + (ids[:-2] if self.drift else ids) + [EOS]
        self.messages.append({"role": "assistant", "ids": rendered, **echo})
        self.calls.append(
            {"agent": agent, "role": role, "messages": messages, "output": [*ids, EOS], "emitted": emitted,
             "orphan": orphan}
        )  # fmt: skip
        return len(self.messages) - 1


class Agent:
    """One agent of an execution: each step asks the policy once, calls a tool and reads its result."""

    def __init__(self, script: Script, name: str, system: int, task: int) -> None:
        self.script, self.name = script, name
        self.role = "main" if name == "main" else "sub-agent"
        self.messages = [script.message("system", system), script.message("user", task)]

    def step(self, sampled: int, observed: int, *, abandoned_first: bool = False) -> None:
        if abandoned_first:
            self.script.call(self.name, self.role, list(self.messages), sampled, tool=True, orphan=True)
        echo = self.script.call(self.name, self.role, list(self.messages), sampled, tool=True)
        asked = self.script.calls[-1]["emitted"]["tool_calls"][0]["id"]
        self.messages += [echo, self.script.message("tool", observed, tool_call_id=asked)]

    def compact(self, sampled: int) -> None:
        """The summary is asked for without the last turn, which the new history keeps."""
        instruction = self.script.message("user", 20)
        self.script.call(
            self.name, self.role + "-summary", [*self.messages[:-2], instruction], sampled, tool=False
        )  # fmt: skip
        self.messages = [self.messages[0], self.script.message("user", sampled), *self.messages[-2:]]


def drift(name: str, *, drift: bool, rewrite: bool) -> Script:
    script = Script(name, drift=drift, rewrite=rewrite)
    agent = Agent(script, "main", 12_000, 50)
    for _ in range(200):
        agent.step(60, 150)
    return script


def agents() -> Script:
    """A main agent with two compactions, three sub-agents that run at the same time, and cut answers asked again."""
    script = Script("agents", drift=True)
    main = Agent(script, "main", 12_000, 50)
    subs: list[Agent] = []
    for turn in range(120):
        main.step(60, 150, abandoned_first=turn % 25 == 24)
        if turn == 10:
            subs = [Agent(script, f"sub{index}", 4_000, 50) for index in range(3)]
        if turn < 60:
            for sub in subs:
                sub.step(60, 150, abandoned_first=turn % 25 == 24)
        if turn in (40, 80):
            main.compact(300)
    return script


def xlong() -> Script:
    """1,053 calls of a main agent with three compactions and ten sub-agents, as large as the paper's longest."""
    script = Script("xlong", drift=True, rewrite=True)
    main = Agent(script, "main", 20_000, 200)
    for phase in range(4):
        for _ in range(150):
            main.step(300, 500)
        if phase < 3:
            main.compact(800)
    for index in range(10):
        sub = Agent(script, f"sub{index}", 4_000, 100)
        for _ in range(45):
            sub.step(200, 300)
    return script


SCENARIOS = {
    "clean": lambda: drift("clean", drift=False, rewrite=False),
    "drift": lambda: drift("drift", drift=True, rewrite=False),
    "rewritten": lambda: drift("rewritten", drift=True, rewrite=True),
    "agents": agents,
    "xlong": xlong,
}


def scenario(name: str) -> dict[str, Any]:
    script = SCENARIOS[name]()
    return {"name": name, "messages": script.messages, "calls": script.calls}
