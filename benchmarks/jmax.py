"""Forward–backward time at J_max 1, 5 and all, as rows and as packed trees (the paper's Figure 9 ablation).

    python benchmarks/jmax.py [--json OUT] [--executions 18] [--tokens-per-node 6] [--hidden 128]

Two executions in nine have the tree of the paper's Appendix C; the others are one main agent, a third of them with one
more path. The paper says nothing about the mixture: it was chosen so that rows at caps 1 and 5 come near the paper's
0.414 and 0.748 of the uncapped forward–backward time. Times are relative to separate rows without a cap.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as File

import torch
from packed_tree import VOCABULARY, build, forward_backward
from torch.distributed import HashStore

from gyre.core.records import CallRecord, RoleClass
from gyre.samples.admission import admit
from gyre.samples.microstep import ExecutionRows
from gyre.samples.rows import build_execution
from gyre.training.config import ParallelConfig
from gyre.training.megatron import parallel
from gyre.training.megatron.forward_batch import pack_rows
from gyre.trajectory.tree import TrajectoryTree

CAPS: dict[str, int | None] = {"1": 1, "5": 5, "all": None}
OUTPUT_SHARE = 0.3
"""Part of a path's messages, in tokens, that the policy wrote."""
SYSTEM_NODES = 20
"""Length of the main agent's system prompt in average messages; a sub-agent's is half as long."""


@dataclass(frozen=True)
class Path:
    """A root-to-leaf path, in message nodes."""

    role: RoleClass
    nodes: int
    after: int | None = None
    """Path whose beginning it shares; None: only the system prompt of its agent."""
    shared: int = 0
    """Message nodes after the system prompt that it shares with that path."""


APPENDIX_C = [
    Path(RoleClass.MAIN, 170),
    Path(RoleClass.MAIN_SUMMARY, 171, after=0, shared=168),
    Path(RoleClass.MAIN, 293),
    Path(RoleClass.SUB_AGENT, 195),
    Path(RoleClass.SUB_AGENT_SUMMARY, 196, after=3, shared=193),
    Path(RoleClass.SUB_AGENT, 123),
    Path(RoleClass.SUB_AGENT, 53),
    Path(RoleClass.SUB_AGENT, 202),
    Path(RoleClass.SUB_AGENT, 156),
    Path(RoleClass.SUB_AGENT, 157),
]
"""The execution that the paper describes (Appendix C): two main paths, a main summary, six of sub-agents and a summary
of theirs; 53 to 293 nodes a path; 168 and 193 shared messages; 1716 nodes in all, 1347 of them different. The paper
gives the shared lengths and the paths of 53 and 202 nodes; the other lengths are chosen so that the totals hold."""


def plain(rng: random.Random) -> list[Path]:
    """An execution of one main agent, in a third of the cases with one more path."""
    nodes = rng.randrange(160, 294)
    paths = [Path(RoleClass.MAIN, nodes)]
    extra = rng.choice(["none", "none", "none", "none", "sub-agent", "abandoned"])
    if extra == "sub-agent":
        paths.append(Path(RoleClass.SUB_AGENT, rng.randrange(53, 203)))
    if extra == "abandoned":
        shared = rng.randrange(nodes // 3, nodes - 20)
        paths.append(Path(RoleClass.MAIN, 1 + shared + rng.randrange(10, 60), after=0, shared=shared))
    return paths


class Synthetic:
    """Grows the records of one execution: a system prompt, then calls of one input and one output message."""

    def __init__(self, index: int, tokens_per_node: int) -> None:
        self._rng = random.Random(index)
        self._id = f"execution-{index}"
        self._mean = tokens_per_node
        self._lengths: dict[str, int] = {}
        self.records: list[CallRecord] = []

    def _tokens(self, mean: float) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(max(1, round(mean * self._rng.uniform(0.5, 1.5))))]

    def _call(self, parent: str | None, delta: list[int], role: RoleClass) -> str:
        call_id = f"{self._id}-{len(self.records)}"
        prefix = self._lengths[parent] if parent else 0
        output = self._tokens(2 * OUTPUT_SHARE * self._mean)
        self._lengths[call_id] = prefix + len(delta) + len(output)
        self.records.append(
            CallRecord(
                execution_id=self._id,
                call_id=call_id,
                seq=len(self.records),
                parent=parent,
                prefix_len=prefix,
                delta_ids=delta,
                output_ids=output,
                output_logprobs=[-1.0] * len(output),
                output_versions=[0] * len(output),
                role=role,
            )
        )
        return call_id

    def grow(self, paths: Sequence[Path]) -> TrajectoryTree:
        grown: list[list[str]] = []
        for path in paths:
            main = path.role in (RoleClass.MAIN, RoleClass.MAIN_SUMMARY)
            rng = random.Random("main" if main else "sub")
            system = [rng.randrange(VOCABULARY) for _ in range(SYSTEM_NODES * self._mean // (1 if main else 2))]
            # A fork is where one call's input differs; the last call of a summary has the request for it as well.
            calls = grown[path.after][: (path.shared - 1) // 2] if path.after is not None else []
            request = path.role in (RoleClass.MAIN_SUMMARY, RoleClass.SUB_AGENT_SUMMARY)
            for _ in range((path.nodes - 1 - request) // 2 - len(calls)):
                delta = self._tokens(2 * (1 - OUTPUT_SHARE) * self._mean)
                calls = [
                    *calls,
                    self._call(calls[-1] if calls else None, delta if calls else system + delta, path.role),
                ]
            grown.append(calls)
        return TrajectoryTree.from_records(self.records)


def grow(count: int, tokens_per_node: int) -> list[TrajectoryTree]:
    """Two executions in nine are that of Appendix C, the others are plain."""
    shapes = [APPENDIX_C if index % 9 in (0, 4) else plain(random.Random(1000 + index)) for index in range(count)]
    return [Synthetic(index, tokens_per_node).grow(paths) for index, paths in enumerate(shapes)]


def executions(trees: Sequence[TrajectoryTree], cap: int | None) -> list[ExecutionRows]:
    return [
        build_execution(tree, admit(tree, j_max=cap, seed=i), advantage=1.0, batch_executions=len(trees))
        for i, tree in enumerate(trees)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=File)
    parser.add_argument("--executions", type=int, default=18)
    parser.add_argument("--tokens-per-node", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parallel.initialize(ParallelConfig(), 0, "cell", HashStore())
    with tempfile.TemporaryDirectory() as directory:
        replicas = build(options.hidden, options.layers, directory)
    trees = grow(options.executions, options.tokens_per_node)
    work = {name: executions(trees, cap) for name, cap in CAPS.items()}
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
