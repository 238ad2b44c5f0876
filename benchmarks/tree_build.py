"""How long does it take to record an execution and to make its training rows, and what is lost on the way?

    python benchmarks/tree_build.py [--rounds N] [--json OUT]

Gyre beside the builders of TRL, agentcore-rl-toolkit (a fork of slime's) and verifiers, each in its own process and
environment (benchmarks/peers.sh) over the same executions (tree_scenarios.py). Rounds interleave the builders; times
are medians, ratios are medians of each round's ratio. Last, Gyre alone on an execution of 1,053 calls.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tree_scenarios
from tree_builders import BUILDERS, PEERS

ENVIRONMENTS = {
    "trl": "trl", "trl_default": "trl", "agentcore": "agentcore-rl-toolkit", "verifiers": "verifiers",
}  # fmt: skip
COMPARED = ["clean", "drift", "rewritten", "agents"]
COLUMNS = ("scenario", "builder", "rows", "targets", "of", "row_tokens", "record_s", "build_s", "gyre_is", "held_mib",
           "peak_mib")  # fmt: skip


def run(builder: str, mode: str, paths: list[Path]) -> list[dict[str, Any]]:
    home = PEERS / ENVIRONMENTS[builder] if builder in ENVIRONMENTS else None
    python = home / "bin" / "python" if home else sys.executable
    command = [str(python), str(Path(__file__).with_name("tree_builders.py")), builder, mode, *map(str, paths)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def compare(builders: list[str], paths: list[Path], rounds: int) -> list[dict[str, Any]]:
    """One result per scenario and builder."""
    timed = [{builder: run(builder, "time", paths) for builder in builders} for _ in range(rounds)]
    # Tracing every allocation is slow: memory is measured on one scenario.
    traced = COMPARED.index("drift")
    memory = {builder: run(builder, "memory", [paths[traced]])[0] for builder in builders}
    results = []
    for index, name in enumerate(COMPARED):
        sampled = max(one["gyre"][index]["targets"] for one in timed)
        for builder in builders:
            runs = [one[builder][index] for one in timed]
            ratios = [total(one["gyre"][index]) / total(one[builder][index]) for one in timed]
            results.append({
                "scenario": name,
                "builder": builder,
                **{key: runs[0][key] for key in ("calls", "rows", "targets", "row_tokens", "unique_tokens")},
                "of": sampled,
                "record_s": statistics.median(one["record_seconds"] for one in runs),
                "build_s": statistics.median(one["build_seconds"] for one in runs),
                "flat_prompts_s": statistics.median(sum(one["engine_ms"]) for one in runs) / 1e3,
                "gyre_is": statistics.median(ratios),
                **(memory[builder] if index == traced else {}),
            })  # fmt: skip
    return results


def total(result: dict[str, Any]) -> float:
    seconds: float = result["record_seconds"] + result["build_seconds"]
    return seconds


def xlong(path: Path, scenario: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Work per call of a long execution by the length of its history, in milliseconds."""
    runs = [run("gyre", "time", [path])[0] for _ in range(rounds)]
    record = [statistics.median(ms) for ms in zip(*(one["record_ms"] for one in runs), strict=True)]
    flat = [statistics.median(ms) for ms in zip(*(one["engine_ms"] for one in runs), strict=True)]
    lengths = [sum(len(scenario["messages"][i]["ids"]) for i in call["messages"]) for call in scenario["calls"]]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    tenth = len(order) // 10
    shortest, longest = order[:tenth], order[-tenth:]

    def median(values: list[float], calls: list[int]) -> float:
        return statistics.median(values[call] for call in calls)

    return {
        "scenario": "xlong",
        **{key: runs[0][key] for key in ("calls", "rows", "targets", "row_tokens", "unique_tokens")},
        "longest_prompt": max(lengths),
        "prompt_tokens_sent": sum(lengths),
        "record_s": sum(record) / 1e3,
        "build_s": statistics.median(one["build_seconds"] for one in runs),
        "record_ms_median": statistics.median(record),
        "record_ms_p99": sorted(record)[len(record) * 99 // 100],
        "record_ms_shortest_tenth": median(record, shortest),
        "record_ms_longest_tenth": median(record, longest),
        "flat_prompt_ms_shortest_tenth": median(flat, shortest),
        "flat_prompt_ms_longest_tenth": median(flat, longest),
        **run("gyre", "memory", [path])[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    builders = [name for name in BUILDERS if name == "gyre" or (PEERS / ENVIRONMENTS[name]).is_dir()]
    missing = BUILDERS.keys() - {*builders}
    if missing:
        print(f"Not set up, so left out: {', '.join(sorted(missing))}. Run benchmarks/peers.sh.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        scenarios = {name: tree_scenarios.scenario(name) for name in tree_scenarios.SCENARIOS}
        paths = {name: Path(directory) / f"{name}.json" for name in scenarios}
        for name, path in paths.items():
            path.write_text(json.dumps(scenarios[name]))
        compared = compare(builders, [paths[name] for name in COMPARED], arguments.rounds)
        long = xlong(paths["xlong"], scenarios["xlong"], arguments.rounds)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for result in compared:
        cells = [result.get(column, "") for column in COLUMNS]
        print("| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")
    print()
    for key, value in long.items():
        print(f"{key:32} {value:,.3f}" if isinstance(value, float) else f"{key:32} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"compared": compared, "xlong": long}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
