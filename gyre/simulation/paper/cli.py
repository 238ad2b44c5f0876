"""The experiments of `gyre simulate` as functions; each prints for people and writes JSON on request."""

import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from gyre.core.errors import ConfigError
from gyre.core.events import Event
from gyre.core.output import write_output
from gyre.simulation.paper import table1 as experiments
from gyre.simulation.paper.beyond import order_hours, paired_gain, work_bound
from gyre.simulation.paper.rows import ROWS, find_row, run_row
from gyre.simulation.paper.trace import TraceResult, load_trace, replay
from gyre.simulation.pictures import draw
from gyre.simulation.workload import WorkloadParams


def table1(seeds: int = 20, json_out: Path | None = None) -> dict[str, Any]:
    """All rows of Table 1 beside the paper."""
    started = time.monotonic()
    result = experiments.table1(WorkloadParams(), seeds)
    print(f"12 steps of NL2RepoBench, 122B, 32 nodes, E[d] = 1.5; {seeds} seeds; hours")
    print(f"{'row':4}{'mode':10}{'stream':8}{'(φ, μ)':10}{'hours':>8}{'± sd':>7}{'paper':>8}{'diff':>8}", end="")
    print(f"{'/ E0':>7}{'paper':>7}")
    base = ROWS["E0"].hours
    for name, entry in result["rows"].items():
        row = ROWS[name]
        point = f"({row.extra_dispatch:g}, {row.steps_per_burst})"
        print(
            f"{name:4}{row.mode:10}{'on' if row.streaming else 'off':8}{point:10}"
            f"{entry['hours']:8.2f}{entry['sd']:7.2f}{entry['paper']:8.2f}{entry['hours'] / entry['paper'] - 1:8.1%}"
            f"{entry['ratio_to_E0']:7.3f}{row.hours / base:7.3f}"
        )
    print(f"took {time.monotonic() - started:.0f} s")
    _write(result, json_out)
    return result


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
