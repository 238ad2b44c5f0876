"""Forward–backward time at J_max 1, 5 and all, as rows and as packed trees (the paper's Figure 9 ablation).

    python benchmarks/jmax.py [--json OUT] [--executions 10] [--context 1500] [--hidden 128]

Executions are synthetic trees of the kind the paper describes: a main agent that compacts its history and abandons
attempts, sub-agents with their own system prompt, summaries; their sizes were chosen so that rows at
cap 5 come near the paper's ratio. Times are relative to separate rows without a cap; the paper reports 0.414 and 0.748
for rows at caps 1 and 5.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

import torch
from packed_tree import VOCABULARY, build, forward_backward
from torch.distributed import HashStore

from gyre.core.records import CallRecord, RoleClass
from gyre.training.config import ParallelConfig
from gyre.training.megatron import parallel
from gyre.training.megatron.pack import pack_rows
from gyre.trajectory.admission import admit
from gyre.trajectory.microstep import ExecutionRows
from gyre.trajectory.rows import build_execution
from gyre.trajectory.tree import TrajectoryTree

CAPS: dict[str, int | None] = {"1": 1, "5": 5, "all": None}


class Synthetic:
    """Grows the records of one execution."""

    def __init__(self, index: int, context: int) -> None:
        self._rng = random.Random(index)
        self._id = f"execution-{index}"
        self._context = context
        self._lengths: dict[str, int] = {}
        self.records: list[CallRecord] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]

    def _call(self, parent: str | None, delta: list[int], out: int, role: RoleClass) -> str:
        call_id = f"{self._id}-{len(self.records)}"
        prefix = self._lengths[parent] if parent else 0
        self._lengths[call_id] = prefix + len(delta) + out
        self.records.append(
            CallRecord(
                execution_id=self._id,
                call_id=call_id,
                seq=len(self.records),
                parent=parent,
                prefix_len=prefix,
                delta_ids=delta,
                output_ids=self._tokens(out),
                output_logprobs=[-1.0] * out,
                output_versions=[0] * out,
                role=role,
            )
        )
        return call_id

    def _calls(self, call: str, length: float, role: RoleClass) -> list[str]:
        """Calls that follow `call` until the context holds `length` tokens, first to last."""
        calls = [call]
        while self._lengths[calls[-1]] < length:
            delta, out = self._tokens(self._rng.randrange(20, 90)), self._rng.randrange(10, 50)
            calls.append(self._call(calls[-1], delta, out, role))
        return calls

    def _segment(self, system: list[int], share: float, role: RoleClass, branches: int = 0) -> str:
        """One agent from a fresh prompt until `share` of the context is used, with attempts that it abandoned and that
        share its beginning; returns the last call."""
        start = self._call(None, system + self._tokens(self._context // 20), 30, role)
        calls = self._calls(start, share * self._context, role)
        for _ in range(branches):
            fork = self._rng.choice(calls[len(calls) // 3 : -1] or calls)
            self._calls(fork, self._lengths[fork] + self._rng.uniform(0.05, 0.25) * self._context, role)
        return calls[-1]

    def grow(self) -> TrajectoryTree:
        uniform, choice = self._rng.uniform, self._rng.choice
        system, sub_system = (
            [random.Random(name).randrange(VOCABULARY) for _ in range(n)]
            for name, n in (("main", self._context // 6), ("sub", self._context // 12))
        )
        for _ in range(choice([0, 0, 0, 1])):
            last = self._segment(system, uniform(0.8, 1.0), RoleClass.MAIN, choice([0, 1, 1]))
            self._call(last, self._tokens(30), 80, RoleClass.MAIN_SUMMARY)
        self._segment(system, uniform(0.6, 1.0), RoleClass.MAIN, choice([0, 0, 1, 1]))
        for _ in range(choice([0, 1, 2, 3, 8])):
            last = self._segment(sub_system, uniform(0.15, 0.4), RoleClass.SUB_AGENT)
            if self._rng.random() < 0.2:
                self._call(last, self._tokens(30), 60, RoleClass.SUB_AGENT_SUMMARY)
        return TrajectoryTree.from_records(self.records)


def executions(count: int, context: int, cap: int | None) -> list[ExecutionRows]:
    trees = [Synthetic(index, context).grow() for index in range(count)]
    return [
        build_execution(tree, admit(tree, j_max=cap, seed=i), advantage=1.0, batch_executions=count)
        for i, tree in enumerate(trees)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--executions", type=int, default=10)
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parallel.initialize(ParallelConfig(), 0, "cell", HashStore())
    with tempfile.TemporaryDirectory() as directory:
        replicas = build(options.hidden, options.layers, directory)
    work = {name: executions(options.executions, options.context, cap) for name, cap in CAPS.items()}
    packs = {
        True: {name: [e.rows for e in made] for name, made in work.items()},
        False: {name: [[row] for e in made for row in e.rows] for name, made in work.items()},
    }
    times: dict[tuple[bool, str], list[float]] = {(share, name): [] for share in packs for name in CAPS}
    for repeat in range(options.repeats + 1):
        for (share, name), seen in times.items():
            seconds = forward_backward(replicas[share], packs[share][name])
            if repeat:
                seen.append(seconds)
    medians = {key: statistics.median(seen) for key, seen in times.items()}
    device = torch.device("cpu")
    tokens = {key: sum(pack_rows(rows, key[0], device).tokens for rows in packs[key[0]][key[1]]) for key in times}
    base, base_tokens = medians[False, "all"], tokens[False, "all"]
    result = {
        "rows": {name: medians[False, name] / base for name in CAPS},
        "packed": {name: medians[True, name] / base for name in CAPS},
        "rows_tokens": {name: tokens[False, name] / base_tokens for name in CAPS},
        "packed_tokens": {name: tokens[True, name] / base_tokens for name in CAPS},
        "uncapped_rows_seconds": base,
        "uncapped_rows_tokens": base_tokens,
        "trajectories_per_execution": {name: statistics.mean(len(e.rows) for e in made) for name, made in work.items()},
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
