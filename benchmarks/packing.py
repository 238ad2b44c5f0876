"""How full and how even are the forward passes that rows are packed into, and how soon is there a first one?

    python benchmarks/packing.py [--rounds N] [--groups B] [--json OUT]

Gyre's packer beside SkyRL 0.4.0's and verl 0.9.1's (`benchmarks/peers.sh packers`; their files are loaded out of the
wheels). Row lengths are log-normal (median 30,000, sigma 0.8, at most the budget of 131,072 tokens). "single": every
execution has one row, so all packers solve the same problem. "trees": 5 rows an execution that share 70 % of the way,
and a beginning that the whole group shares; only Gyre computes what is shared once.

Offline, a packer sees all groups of a batch at once; streaming, one group at a time, as it becomes ready. Fill and
max/mean cost are over forward passes; cost is n + n²/16384 a row, of packed trees for Gyre. verl's packer balances
token counts and does not hold a budget: "over" is the share of its passes above it. Times are CPU time of one thread.
"""

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
import types
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gyre.samples.microstep import ExecutionRows, Row
from gyre.samples.packing import pack, row_cost
from gyre.samples.prefixes import SharedRows

BUDGET = 131_072
LINE = (
    "{scenario:7} {mode:10} {packer:27} passes {passes:5} tokens {tokens:.3e} cost {cost:.3e} fill {fill:.3f} "
    "over {over:.2f} max/mean {max_mean_cost:.3f} spread {cost_spread:.3f} "
    "first pass: {groups_for_first_pass} groups + {first_pass_ms:.0f} ms, all {ms:.0f} ms"
)
WHEELS = Path(__file__).parents[1] / ".cache" / "peers" / "packers"
Group = list[ExecutionRows]
Passes = list[tuple[int, float]]
"""(tokens, cost) of every forward pass."""


def length(rng: random.Random) -> int:
    return max(64, min(BUDGET, int(rng.lognormvariate(10.309, 0.8))))


def row(ids: list[int]) -> Row:
    return Row(ids_T=ids, targets=[len(ids) - 1], logprobs=[-1.0], versions=[0])


def execution(name: str, rows: list[list[int]]) -> ExecutionRows:
    return ExecutionRows(execution_id=name, advantage=1.0, weight=1.0, rows=[row(ids) for ids in rows])


def single(rng: random.Random, group: int) -> Group:
    """80 executions of one row."""
    return [execution(f"{group}-{i}", [[rng.randrange(1 << 30)] * length(rng)]) for i in range(80)]


def trees(rng: random.Random, group: int) -> Group:
    """16 executions of 5 rows."""
    made = []
    for i in range(16):
        trunk = [1] * 2_000 + [rng.randrange(1 << 30)] * BUDGET
        rows = []
        for _ in range(5):
            whole = length(rng)
            rows.append(trunk[: int(0.7 * whole)] + [rng.randrange(1 << 30)] * (whole - int(0.7 * whole)))
        made.append(execution(f"{group}-{i:02}", rows))
    return made


def gyre(groups: Sequence[Group]) -> Passes:
    executions = [one for group in groups for one in group]
    steps = pack(0, executions, budget_tokens=BUDGET, micro_step_prefix="m")
    sizes = []
    for step in steps:
        for one in step.packs:
            rows = [step.executions[i].rows[j] for i, j in one]
            size = SharedRows(rows).size(range(len(rows)))
            sizes.append((size.tokens, size.cost))
    return sizes


def by_lengths(bins_of: Callable[[list[int]], list[list[int]]]) -> Callable[[Sequence[Group]], Passes]:
    """A packer that knows lengths only; every row is computed on its own."""

    def packed(groups: Sequence[Group]) -> Passes:
        lengths = [len(one.ids_T) - 1 for group in groups for execution in group for one in execution.rows]
        bins = bins_of(lengths)
        return [(sum(lengths[i] for i in bin), sum(row_cost(lengths[i]) for i in bin)) for bin in bins]

    return packed


def module(wheel: str, path: str, stubs: Sequence[str] = ()) -> types.ModuleType:
    """A file of a wheel as a module, with empty modules for what else it imports."""
    [archive] = WHEELS.glob(f"{wheel}-*.whl")
    for name in stubs:
        stub = sys.modules.setdefault(name, types.ModuleType(name))
        stub.DataProto = stub.get_device_name = stub.tensordict_utils = None  # type: ignore[attr-defined]
    made = importlib.util.module_from_spec(importlib.util.spec_from_loader(f"{wheel}_packer", loader=None))  # type: ignore[arg-type]
    sys.modules[made.__name__] = made
    exec(compile(zipfile.ZipFile(archive).read(path), path, "exec"), made.__dict__)
    return made


def packers() -> dict[str, Callable[[Sequence[Group]], Passes]]:
    skyrl = module("skyrl", "skyrl/train/dataset/bin_packing.py")
    verl = module(
        "verl", "verl/utils/seqlen_balancing.py", ("verl", "verl.protocol", "verl.utils", "verl.utils.device")
    )

    def karmarkar_karp(lengths: list[int]) -> list[list[int]]:
        bins: list[list[int]] = verl.karmarkar_karp(lengths, -(-sum(lengths) // BUDGET), equal_size=False)
        return bins

    return {
        "gyre": gyre,
        "skyrl first fit decreasing": by_lengths(lambda n: skyrl.FirstFitDecreasing(BUDGET).pack(n)),
        "skyrl balanced": by_lengths(lambda n: skyrl.Balanced(BUDGET).pack(n)),
        "verl karmarkar_karp": by_lengths(karmarkar_karp),
    }


def measure(packer: Callable[[Sequence[Group]], Passes], chunks: Sequence[Sequence[Group]]) -> dict[str, Any]:
    passes: Passes = []
    seconds = []
    for chunk in chunks:
        started = time.process_time()
        passes += packer(chunk)
        seconds.append(time.process_time() - started)
    tokens, costs = [n for n, _ in passes], [cost for _, cost in passes]
    return {
        "passes": len(passes),
        "tokens": sum(tokens),
        "cost": sum(costs),
        "fill": statistics.fmean(min(n, BUDGET) for n in tokens) / BUDGET,
        "over": sum(n > BUDGET for n in tokens) / len(tokens),
        "max_mean_cost": max(costs) / statistics.fmean(costs),
        "cost_spread": statistics.pstdev(costs) / statistics.fmean(costs),
        "groups_for_first_pass": len(chunks[0]),
        "first_pass_ms": 1e3 * seconds[0],
        "ms": 1e3 * sum(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for scenario in (single, trees):
        rng = random.Random(7)
        groups = [scenario(rng, group) for group in range(arguments.groups)]
        for mode, chunks in (("offline", [groups]), ("streaming", [[group] for group in groups])):
            rounds = [
                {name: measure(packer, chunks) for name, packer in packers().items()} for _ in range(arguments.rounds)
            ]
            for name in rounds[0]:
                timed = {key: statistics.median(one[name][key] for one in rounds) for key in ("first_pass_ms", "ms")}
                results.append(
                    {"scenario": scenario.__name__, "mode": mode, "packer": name, **rounds[0][name], **timed}
                )
                print(LINE.format(**results[-1]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"budget": BUDGET, "results": results}, indent=1))


if __name__ == "__main__":
    main()
