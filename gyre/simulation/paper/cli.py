"""The experiments of `gyre simulate` as functions; each prints for people and writes JSON on request."""

import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from gyre.core.errors import ConfigError
from gyre.core.events import Event
from gyre.core.system.output import write_output
from gyre.simulation.paper import table1 as experiments
from gyre.simulation.paper.beyond import order_hours, paired_gain, work_bound
from gyre.simulation.paper.comparisons import FIGURE8, TABLE2, Comparison, compare, sensitivity
from gyre.simulation.paper.rows import ROWS, find_row, run_row
from gyre.simulation.paper.trace import TraceResult, load_trace, replay
from gyre.simulation.pictures import draw
from gyre.simulation.workload import WorkloadParams

PAPER_SLACK = 0.2085
"""§6.3: "In E0, rollout fully hides training, with 20.85 % slack remaining"; what it is a share of is not said."""


def table1(seeds: int = 20, json_out: Path | None = None, changes: dict[str, float] | None = None) -> dict[str, Any]:
    """All rows of Table 1 beside the paper."""
    started = time.monotonic()
    result = experiments.table1(changed(changes), seeds)
    print(f"12 steps of NL2RepoBench, 122B, 32 nodes, E[d] = 1.5; {seeds} seeds; hours")
    print(f"{'row':4}{'mode':10}{'stream':8}{'(φ, μ)':10}{'hours':>8}{'± sd':>7}{'paper':>8}{'diff':>8}", end="")
    print(f"{'/ E0':>7}{'paper':>7}{'idle':>7}  (idle: of the training role; the paper's E0: {PAPER_SLACK:.2%})")
    base = ROWS["E0"].hours
    for name, entry in result["rows"].items():
        row = ROWS[name]
        point = f"({row.extra_dispatch:g}, {row.steps_per_burst})"
        print(
            f"{name:4}{row.mode:10}{'on' if row.streaming else 'off':8}{point:10}"
            f"{entry['hours']:8.2f}{entry['sd']:7.2f}{entry['paper']:8.2f}{entry['hours'] / entry['paper'] - 1:8.1%}"
            f"{entry['ratio_to_E0']:7.3f}{row.hours / base:7.3f}{entry['idle']:7.1%}"
        )
    print(f"took {time.monotonic() - started:.0f} s")
    _write(result, json_out)
    return result


def table2(seeds: int = 3, json_out: Path | None = None) -> dict[str, Any]:
    """DeepSWE and TerminalBench with 122B, 24 steps, at two targets of staleness."""
    return _comparison("24 steps of DeepSWE and TerminalBench, 122B, 24 nodes", TABLE2, seeds, json_out)


def figure8(seeds: int = 3, json_out: Path | None = None) -> dict[str, Any]:
    """NL2RepoBench with 2.4T, 48 steps."""
    return _comparison("48 steps of NL2RepoBench, 2.4T, 192 nodes", FIGURE8, seeds, json_out)


def _comparison(title: str, comparisons: list[Comparison], seeds: int, json_out: Path | None) -> dict[str, Any]:
    started = time.monotonic()
    found = compare(comparisons, seeds)
    print(f"{title}; {seeds} seeds; speed-up of Gyre, in brackets the paper's")
    for name, entry in found.items():
        paper = entry["paper"]
        gains = ", ".join(
            f"{entry[f'over_{name}']:.2f} ± {entry[f'over_{name}_sd']:.2f} [{paper[f'over_{name}']:.2f}] over {name}"
            for name in ("async", "colocate")
        )
        hours = f"; {entry['hours']['gyre']:.1f} h [{paper['hours']:.1f}]" if "hours" in paper else ""
        shares = f"{entry['long_queries']:.1%} of the queries take four hours, {entry['lost_queries']:.1%} hold a loss"
        print(f"{name}: {gains}{hours}; executions {entry['execution_hours']:.2f} h; {shares}")
    varied = sensitivity(comparisons, 1)
    print("With one assumption changed (one seed): over async / over colocate")
    for variation, entries in varied.items():
        ratios = "   ".join(f"{one['over_async']:.2f} / {one['over_colocate']:.2f}" for one in entries.values())
        print(f"{variation:40}{ratios}")
    print(f"took {time.monotonic() - started:.0f} s")
    result = {"comparisons": found, "sensitivity": varied, "seeds": seeds}
    _write(result, json_out)
    return result


def changed(changes: dict[str, float] | None) -> WorkloadParams:
    """The calibrated workload with other values. Raises ConfigError for what is no parameter of it."""
    try:
        return msgspec.convert(msgspec.to_builtins(WorkloadParams()) | (changes or {}), WorkloadParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}.") from error


def speedups(seeds: int = 5, json_out: Path | None = None) -> dict[str, Any]:
    """48 steps at E[d] = 1 and 1.5 against Async and Colocate."""
    started = time.monotonic()
    result = experiments.speedups(WorkloadParams(), seeds)
    print(f"48 steps of NL2RepoBench, 122B; {seeds} seeds; paper: 1.42–1.53× over Async, 1.36–1.47× over Colocate")
    for target, entry in result.items():
        hours = "  ".join(f"{name} {value:.1f} h" for name, value in entry["hours"].items())
        gains = f"{entry['over_async']:.2f}× over Async, {entry['over_colocate']:.2f}× over Colocate"
        print(f"E[d] = {target}: {gains} ({hours})")
    print(f"took {time.monotonic() - started:.0f} s")
    _write(result, json_out)
    return result


def trace(file: Path, row: str, steps: int = 12, json_out: Path | None = None) -> TraceResult:
    """A fixed workload without randomness (docs/scheduling.md). Raises ConfigError for bad input."""
    result = replay(load_trace(file), find_row(row), steps)
    print(f"{row}: {steps} steps end after {result.step_end_hours[-1]:.4f} h")
    _write(msgspec.to_builtins(result), json_out)
    return result


def beyond(seeds: int = 5, json_out: Path | None = None) -> dict[str, Any]:
    """E0 under fifo, under `longest_first` by the quality of its predictions, and the work bound; paired by seed."""
    params, numbers = WorkloadParams(), range(seeds)
    hours = {
        "fifo": order_hours(params, numbers, None, lightest_first=False),
        "fifo, lightest trains first": order_hours(params, numbers, None, lightest_first=True),
        "launch only, log-error 0.6": order_hours(params, numbers, 0.6, lightest_first=False),
        "launch only, oracle": order_hours(params, numbers, 0.0, lightest_first=False),
        "longest_first, log-error 0.6": order_hours(params, numbers, 0.6, lightest_first=True),
        "longest_first, oracle": order_hours(params, numbers, 0.0, lightest_first=True),
        "work bound": [work_bound(params, ROWS["E0"], seed) for seed in numbers],
    }
    print(f"E0, 12 steps, 32 nodes, E[d] = 1.5; {seeds} seeds; hours, and paired difference to fifo ± standard error")
    result: dict[str, Any] = {}
    for name, values in hours.items():
        gain, error = paired_gain(values, hours["fifo"])
        result[name] = {"hours": statistics.mean(values), "gain": gain, "standard_error": error}
        print(f"{name:32}{result[name]['hours']:8.2f}{gain:+8.2%} ± {error:.2%}")
    _write(result, json_out)
    return result


def picture(row: str, path: Path, steps: int = 12, seed: int = 0) -> None:
    """Role timeline, waterlevel and ready groups of one row, as PNG or SVG. Raises ConfigError for another kind of file
    and for one that cannot be written."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise ConfigError(f"{path} is no .png or .svg file: choose another one for --plot.")
    events: list[Event] = []
    run_row(find_row(row), WorkloadParams(), seed=seed, steps=steps, readers=(events.append,))
    write_output(path, draw(events, f"{row}, {steps} steps", kind), "--plot")
    print(f"wrote {path}")


def _write(result: Any, path: Path | None) -> None:
    if path is not None:
        write_output(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n", "--json")
