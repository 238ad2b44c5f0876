"""One trajectory builder over one scenario, timed inside; tree_build.py runs this file in the builder's environment.

    python tree_builders.py NAME time|memory SCENARIO.json ... > results.json

Every builder gets the same calls: fresh message objects (what parsing a request leaves), and token ids that need no
encoding. Timed are `record` (from the parsed request to the stored call) and `build` (the training rows); decoding the
request is not. A builder that needs the whole prompt gets it for nothing. Seconds are CPU seconds of one thread.
"""

import ast
import dataclasses
import enum
import gc
import json
import sys
import time
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

from tree_scenarios import HEADER

PEERS = Path(__file__).parents[1] / ".cache" / "peers"


class Rows:
    """What a builder made: per row its tokens and how many of them train."""

    def __init__(self, rows: list[tuple[int, int]], engine_ms: list[float] | None = None, stored: int = 0) -> None:
        self.rows, self.engine_ms, self.stored = rows, engine_ms or [], stored


class Call:
    """One call as a server sees it: it shares no id or log-prob with an earlier call, and no message when timed."""

    def __init__(self, scenario: dict[str, Any], call: dict[str, Any], *, anew: bool) -> None:
        self._rendered = [scenario["messages"][i] for i in call["messages"]]
        plain = [{key: value for key, value in message.items() if key != "ids"} for message in self._rendered]
        self.messages: list[dict[str, Any]] = json.loads(json.dumps(plain)) if anew else plain
        self.output = list(array("i", call["output"]))
        self.logprobs = [-1.0 / (2 + i) for i in range(len(self.output))]
        self.emitted: dict[str, Any] = json.loads(json.dumps(call["emitted"]))
        self.agent: str = call["agent"]
        self.role: str = call["role"]
        self.orphan: bool = call["orphan"]

    def ids(self) -> list[list[int]]:
        """Per message."""
        return [list(array("i", message["ids"])) for message in self._rendered]

    def prompt(self) -> list[int]:
        """As a re-rendering of the whole history makes it."""
        return [token for ids in self.ids() for token in ids] + HEADER


class Gyre:
    def __init__(self, scenario: dict[str, Any]) -> None:
        import msgspec

        from gyre.core.records import RoleClass
        from gyre.trajectory import conversation
        from gyre.trajectory.call import Sample
        from gyre.trajectory.tree import TrajectoryTree

        self.decoder = msgspec.json.Decoder(list[conversation.Message])
        self.conversation, self.message = conversation.Conversation, conversation.Message
        self.tool_call, self.sample, self.role = conversation.ToolCall, Sample, RoleClass
        self.tree = TrajectoryTree("bench", Table(scenario))  # type: ignore[arg-type]
        self.engine_ms: list[float] = []

    def parse(self, call: Call) -> Any:
        emitted = self._message({"role": "assistant", **call.emitted})
        sample = self.sample(
            output_ids=call.output, logprobs=call.logprobs, versions=[0] * len(call.output), finish="stop"
        )
        return self.conversation(tuple(map(self._message, call.messages))), emitted, sample

    def _message(self, fields: dict[str, Any]) -> Any:
        calls = tuple(self.tool_call(**call) for call in fields.pop("tool_calls", ()))
        return self.message(tool_calls=calls, **fields)

    def record(self, call: Call, parsed: Any) -> float:
        conversation, emitted, sample = parsed
        started = time.process_time()
        prepared = self.tree.prepare(conversation, role=self.role(call.role), agent_id=call.agent)
        seconds = time.process_time() - started
        assert len(prepared.prompt) == prepared.input_len
        self.engine_ms.append((time.process_time() - started - seconds) * 1e3)
        started = time.process_time()
        self.tree.commit(
            prepared, sample, None if call.orphan else emitted, call_id=f"c{len(self.tree)}", trainable=not call.orphan
        )
        return seconds + time.process_time() - started

    def build(self) -> Rows:
        from gyre.samples.admission import admit
        from gyre.samples.rows import build_row

        rows = [build_row(self.tree, path) for path in admit(self.tree, j_max=None, seed=0)]
        return Rows([(len(row.ids_T), len(row.targets)) for row in rows], self.engine_ms, self.tree.unique_tokens)


class Table:
    """Stands in for Gyre's renderer: a message's ids are looked up by its text."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.ids = {message["text"].strip(): array("i", message["ids"]) for message in scenario["messages"]}

    def render(self, conversation: Any) -> list[int]:
        return self.bridge((), (), conversation, 0)

    def bridge(self, _prompt: Any, _output: Any, conversation: Any, start: int) -> list[int]:
        new: list[int] = []
        for message in conversation.messages[start:]:
            new.extend(self.ids[message.text.strip()])
        return new + HEADER


class Agentcore:
    """agentcore-rl-toolkit, a fork of slime's builder that forks a row at every drift."""

    def __init__(self, _scenario: dict[str, Any]) -> None:
        from agentcore_rl_toolkit.rollout_gateway.trace import BaseTrace
        from agentcore_rl_toolkit.rollout_gateway.trajectory import TrajectoryManager, TurnRecord

        self.manager, self.turn, self.base = TrajectoryManager(), TurnRecord, BaseTrace()

    def parse(self, call: Call) -> Any:
        turn = self.turn(call.prompt(), call.output, "stop", call.logprobs)
        return call.messages, {"role": "assistant", **call.emitted}, turn

    def record(self, _call: Call, parsed: Any) -> float:
        messages, reply, turn = parsed
        started = time.process_time()
        self.manager.record_turn("s", turn=turn, prompt_messages=messages, response_message=reply)
        return time.process_time() - started

    def build(self) -> Rows:
        rows = self.manager.get_trajectory("s", base_sample=self.base)
        return Rows([(len(row.token_ids), sum(row.loss_mask)) for row in rows])


class Trl:
    """TRL keeps the turns of an execution in order and joins them at its end."""

    threshold = 0
    """fork_threshold_tokens of lossless capture."""

    def __init__(self, _scenario: dict[str, Any]) -> None:
        self.names = load_definitions(
            next((PEERS / "trl").glob("lib/*/site-packages/trl/experimental/async_grpo/async_rollout_worker.py")),
            {"TurnRecord", "TrainingSequence", "_common_prefix_len", "DriftKind", "_SampleBuilder",
             "_chain_to_sequences"},
        )  # fmt: skip
        self.turns: list[Any] = []

    def parse(self, call: Call) -> Any:
        return call.prompt()

    def record(self, call: Call, parsed: Any) -> float:
        started = time.process_time()
        self.turns.append(self.names["TurnRecord"](parsed, call.output, call.logprobs))
        return time.process_time() - started

    def build(self) -> Rows:
        rows, _ = self.names["_chain_to_sequences"](self.turns, "s", self.threshold)
        return Rows([(len(row.input_ids), sum(row.completion_mask)) for row in rows])


class TrlDefault(Trl):
    threshold = 1024


class Verifiers:
    """verifiers' message graph; its bridge is given the new ids, and costs one copy of the prompt as it must."""

    def __init__(self, _scenario: dict[str, Any]) -> None:
        from pydantic import TypeAdapter
        from verifiers.v1 import graph, types
        from verifiers.v1.trace import Trace

        self.graph, self.types = graph, types
        self.trace = Trace.model_construct(nodes=[], calls=[], tools=[], mm_token_type_id_map={})
        self.messages = TypeAdapter(types.Messages)

    def parse(self, call: Call) -> Any:
        prompt = self.messages.validate_python([self._wire(message) for message in call.messages])
        reply = self.types.AssistantMessage(**self._wire({"role": "assistant", **call.emitted}))
        return prompt, reply, call.prompt(), call.ids()

    def _wire(self, fields: dict[str, Any]) -> dict[str, Any]:
        wire = {key: value for key, value in fields.items() if key not in ("text", "tool_calls")}
        wire["content"] = fields["text"]
        if fields.get("tool_calls"):
            wire["tool_calls"] = [
                {**call, "arguments": call["arguments"] if isinstance(call["arguments"], str)
                 else json.dumps(call["arguments"])}
                for call in fields["tool_calls"]
            ]  # fmt: skip
        return wire

    def record(self, call: Call, parsed: Any) -> float:
        messages, reply, whole, ids = parsed
        started = time.process_time()
        turn = self.graph.prepare_turn(self.trace, messages)
        tail = ids[turn.tail_start :]
        foreign = any(message.role == "assistant" for message in turn.tail)
        previous = None if foreign else turn.previous_renderer_token_ids()
        if previous is not None:
            prompt = previous[0] + previous[1]
            spans: list[Any] = [None] * turn.tail_start
            at = len(prompt)
            for part in tail:
                prompt += part
                spans.append((at, at + len(part)))
                at += len(part)
            prompt += HEADER
        else:
            prompt, spans, at = whole, [], 0
            for part in ids:
                spans.append((at, at + len(part)))
                at += len(part)
        tokens = self.types.TurnTokens.model_construct(
            prompt_ids=prompt, completion_ids=call.output, completion_logprobs=call.logprobs,
            renderer_prompt_ids=None, bridged=previous is not None, message_spans=spans, is_content=None,
            mm_placeholders=None, mm_token_type_id_map=None, routed_experts=None, sampling_mask=None,
        )  # fmt: skip
        response = self.types.Response.model_construct(
            id="r", created=0, model="m", message=reply, finish_reason="stop", tokens=tokens
        )
        turn.commit(response)
        return time.process_time() - started

    def build(self) -> Rows:
        # A sampled token shared by branches trains in the first of them, as in prime-rl.
        seen: set[int] = set()
        rows = []
        for branch in self.trace.branches:
            ids, logprobs = branch.token_ids, branch.logprobs
            mask: list[bool] = []
            for node in branch.nodes:
                mask.extend(node.mask if id(node) not in seen else [False] * len(node.mask))
                seen.add(id(node))
            assert len(ids) == len(logprobs) == len(mask)
            rows.append((len(ids), sum(mask)))
        return Rows(rows)


BUILDERS: dict[str, Any] = {
    "gyre": Gyre, "trl": Trl, "trl_default": TrlDefault, "agentcore": Agentcore, "verifiers": Verifiers,
}  # fmt: skip


def load_definitions(path: Path, names: set[str]) -> dict[str, Any]:
    """Some top-level definitions of a module whose imports are not at hand (torch, datasets, vLLM)."""
    module = ast.parse(path.read_text())
    module.body = [node for node in module.body if getattr(node, "name", "") in names]
    scope: dict[str, Any] = {
        "dataclass": dataclasses.dataclass, "field": dataclasses.field, "enum": enum, "RolloutId": str,
        "__name__": "peer",
    }  # fmt: skip
    sys.modules["peer"] = type(sys)("peer")
    exec(compile(module, str(path), "exec"), scope)
    return scope


def record(name: str, scenario: dict[str, Any], *, anew: bool) -> tuple[Any, list[float]]:
    """The builder after the last call, and the seconds of each call."""
    builder = BUILDERS[name](scenario)
    seconds = []
    for each in scenario["calls"]:
        if each["orphan"] and name != "gyre":
            continue  # a peer's adapter records no answer that was not delivered
        call = Call(scenario, each, anew=anew)
        seconds.append(builder.record(call, builder.parse(call)))
    return builder, seconds


def timed(name: str, scenario: dict[str, Any]) -> dict[str, Any]:
    builder, seconds = record(name, scenario, anew=True)
    started = time.process_time()
    rows = builder.build()
    build = time.process_time() - started
    return {
        "calls": len(seconds),
        "rows": len(rows.rows),
        "targets": sum(targets for _, targets in rows.rows),
        "row_tokens": sum(tokens for tokens, _ in rows.rows),
        "unique_tokens": rows.stored,
        "record_seconds": sum(seconds),
        "build_seconds": build,
        "record_ms": [each * 1e3 for each in seconds],
        "engine_ms": rows.engine_ms,
    }


def memory(name: str, scenario: dict[str, Any]) -> dict[str, Any]:
    """MiB of Python allocations: what the recorded execution holds, and the peak while its rows are built.

    Without the texts of messages, which every builder that keeps them keeps once."""
    record(name, {**scenario, "calls": scenario["calls"][:1]}, anew=False)[0].build()  # imports what it needs
    tracemalloc.start()
    builder, _ = record(name, scenario, anew=False)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    rows = builder.build()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows.rows
    return {"held_mib": held / 2**20, "peak_mib": peak / 2**20}


def main() -> None:
    name, mode, *paths = sys.argv[1:]
    measure = {"time": timed, "memory": memory}[mode]
    json.dump([measure(name, json.loads(Path(path).read_text())) for path in paths], sys.stdout)


if __name__ == "__main__":
    main()
