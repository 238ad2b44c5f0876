"""Who trains when: Gyre's rules beside verl's published dynamic policies, on the same executions.

    python benchmarks/dynamic_policies.py [--seeds N] [--steps N] [--json OUT]

Every entry is the real controller under the virtual clock on the calibrated workload (docs/research/calibration.md),
with 32 nodes and E[d] = 1.5. The policies of verl 0.9.1 (`benchmarks/peers.sh packers` fetches the wheel; their files
run unchanged, loaded out of it) decide as they do in verl's fully asynchronous trainer: before a cycle they say how
many samples (here: groups) must be ready until the trainer's nodes stop serving, after the weight sync whether they
serve again. Two conditions are Gyre's: nodes stop serving only when the pool can carry all executions, so that none
waits for an engine (verl lets its pool be oversubscribed), and groups are dispatched at boundaries.

Printed: hours per step, share of node time in which nothing useful ran (a node serves in proportion to its executions
out of 36, and trains while it processes micro-steps), mean staleness.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import statistics
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from gyre.core.events import (
    Event,
    ExecutionClosed,
    ExecutionStarted,
    GroupReady,
    MicroStepDone,
    StepDone,
    TransitionFinished,
)
from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.modes import Mode, ModeDecision
from gyre.scheduling.rules import Situation, waterlevel_allows
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.paper.rows import EXECUTIONS_PER_NODE, ROWS, TableRow
from gyre.simulation.predictions import predicted_order
from gyre.simulation.synthetic import CellTimes
from gyre.simulation.workload import WorkloadParams

WHEEL = Path(__file__).parents[1] / ".cache" / "peers" / "packers" / "verl-0.9.1-py3-none-any.whl"
PACKAGE = "verl/experimental/fully_async_policy/dynamic_schedule"
NODES = 32


def published() -> types.SimpleNamespace:
    """verl's policy classes and their context, out of the wheel; `ray` is only named there."""
    if not WHEEL.exists():
        raise SystemExit(f"{WHEEL} is missing; run `bash benchmarks/peers.sh packers` first.")
    package = types.ModuleType("verl_dynamic")
    package.__path__ = []
    sys.modules |= {"verl_dynamic": package, "ray": types.ModuleType("ray")}
    found: dict[str, Any] = {}
    with zipfile.ZipFile(WHEEL) as archive:
        for name in ("base", "default_policy", "fixed_ratio_policy"):
            spec = importlib.util.spec_from_loader(f"verl_dynamic.{name}", loader=None)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            exec(compile(archive.read(f"{PACKAGE}/{name}.py"), f"{PACKAGE}/{name}.py", "exec"), module.__dict__)
            found |= vars(module)
    return types.SimpleNamespace(**found)


class VerlPolicy:
    """A policy of verl behind Gyre's `Mode`, for one cell (the trainer's nodes) and a pool; reads the journal too."""

    releases = True

    def __init__(self, config: SchedulerConfig, rule: Any, context: Any) -> None:
        self._config, self._rule = config, rule
        self._context = context(
            required_samples=config.groups_per_step,
            trigger_parameter_sync_step=config.steps_per_burst,
            total_generated_samples=0,
            expected_samples=0,
            buffer_samples=round(config.extra_dispatch * config.groups_per_step),
        )
        self._now = 0.0
        self._steps = 0
        self._began: float | None = None

    @property
    def _queue(self) -> int:
        return int(self._context.total_generated_samples) - self._steps * self._config.groups_per_step

    def read(self, event: Event) -> None:
        self._now = event.t
        match event:
            case GroupReady():
                self._context.total_generated_samples += 1
                self._filled()
            case TransitionFinished(target="training"):
                self._context.last_deactivate_duration_s = event.seconds
                self._collect()
            case TransitionFinished(source="training"):
                self._context.last_activate_duration_s = event.seconds
            case StepDone():
                self._steps += 1
                if self._steps % self._config.steps_per_burst:
                    self._collect()
            case _:
                pass

    def decide(self, situation: Situation) -> ModeDecision:
        with contextlib.redirect_stdout(io.StringIO()):
            return self._boundary() if situation.boundary else self._inside(situation)

    def _inside(self, situation: Situation) -> ModeDecision:
        waits_for = self._rule.deactivate_wait_samples(self._context)
        if situation.training or situation.ready < waits_for:
            return ModeDecision(situation.training)
        return ModeDecision(int(waterlevel_allows(self._config, situation.waterlevel, 0)))

    def _boundary(self) -> ModeDecision:
        context, bursts = self._context, self._steps // self._config.steps_per_burst
        context.expected_samples = self._steps * self._config.groups_per_step
        serves = self._rule.should_activate_after_step(bursts, False, context)
        self._rule.update_after_step(bursts, context)
        context.last_activate_duration_s = context.last_deactivate_duration_s = 0.0
        context.step_wait_times, context.step_wait_samples = [], []
        if not serves:
            self._collect()
        return ModeDecision(int(not serves))

    def _collect(self) -> None:
        """A collection of B samples begins."""
        self._context.step_wait_samples.append(max(0, self._config.groups_per_step - self._queue))
        self._began = self._now
        self._filled()

    def _filled(self) -> None:
        if self._began is not None and self._queue >= self._config.groups_per_step:
            self._context.step_wait_times.append(self._now - self._began)
            self._began = None


class Usage:
    """Useful node-seconds, read from the journal up to the last step."""

    def __init__(self, cell_nodes: int) -> None:
        self._cell_nodes = cell_nodes
        self._t = 0.0
        self._running = 0
        self._useful = 0.0

    def read(self, event: Event) -> None:
        self._useful += self._running / EXECUTIONS_PER_NODE * (event.t - self._t)
        self._t = event.t
        match event:
            case ExecutionStarted():
                self._running += 1
            case ExecutionClosed():
                self._running -= 1
            case MicroStepDone():
                self._useful += event.seconds * self._cell_nodes
            case _:
                pass

    def idle(self) -> float:
        return 1 - self._useful / (NODES * self._t)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    row: TableRow
    rule: str = ""
    """Name of verl's policy class; empty for Gyre's policy of the row."""
    log_error: float | None = None
    """longest_first with predictions that far off; None is fifo."""


def entries() -> list[Entry]:
    found = [
        Entry(name="Gyre E0, longest_first, log-error 0.6", row=ROWS["E0"], log_error=0.6),
        Entry(name="Gyre E0", row=ROWS["E0"]),
        Entry(name="coarse with streaming (C2)", row=ROWS["C2"]),
        Entry(name="async with streaming (A3)", row=ROWS["A3"]),
        Entry(name="async (A0)", row=ROWS["A0"]),
        Entry(name="colocate (C0)", row=ROWS["C0"]),
    ]
    for rule in ("Default", "FixedRatio"):
        for nodes, phi, mu, streaming in (
            (16, 1.5, 1, False),
            (8, 1.5, 1, False),
            (16, 1.5, 1, True),
            (28, 0.5, 3, True),
        ):
            name = f"verl {rule}, {nodes} + {NODES - nodes}, φ = {phi}, μ = {mu}{', streaming' * streaming}"
            row = msgspec.structs.replace(
                ROWS["C3"],
                name=name,
                streaming=streaming,
                extra_dispatch=phi,
                steps_per_burst=mu,
                nodes=nodes,
                pool_nodes=NODES - nodes,
            )
            found.append(Entry(name=name, row=row, rule=f"{rule}DynamicSchedulePolicy"))
    return found


def measure(
    entry: Entry, params: WorkloadParams, verl: types.SimpleNamespace, seeds: int, steps: int
) -> dict[str, Any]:
    row = entry.row
    config = row.config(steps=steps)
    if entry.log_error is not None:
        config = msgspec.structs.replace(config, launch_order="longest_first")
    hours, idle, staleness = [], [], []
    for seed in range(seeds):
        usage = Usage(row.nodes)
        readers = [usage.read]
        policy: Mode | None = None
        if entry.rule:
            policy = VerlPolicy(config, getattr(verl, entry.rule)(), verl.DynamicScheduleContext)
            readers.append(policy.read)
        stats = simulate(
            config,
            Layout(cell_nodes=row.nodes, pool_nodes=row.pool_nodes),
            params,
            seed=seed,
            times=CellTimes(publication_s=params.publication_s, update_s=params.update_s),
            readers=tuple(readers),
            order=predicted_order(params, seed, config.executions_per_group, entry.log_error),
            policy=policy,
        )
        hours.append(stats.step_ends[-1] / steps)
        idle.append(usage.idle())
        staleness.append(statistics.mean(d for step in stats.staleness for d in step))
    return {
        "hours_per_step": statistics.mean(hours),
        "hours": hours,
        "idle_share": statistics.mean(idle),
        "mean_staleness": statistics.mean(staleness),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    verl, params = published(), WorkloadParams()
    result = {}
    print(
        f"{arguments.steps} steps, {arguments.seeds} seeds\n{'':52}{'h / step':>9}{'/ E0':>7}{'idle':>8}{'mean d':>8}"
    )
    for entry in entries():
        result[entry.name] = measure(entry, params, verl, arguments.seeds, arguments.steps)
    base = result["Gyre E0"]["hours_per_step"]
    for name, value in sorted(result.items(), key=lambda item: float(item[1]["hours_per_step"])):
        own = value["hours_per_step"]
        print(f"{name:52}{own:9.3f}{own / base:7.2f}{value['idle_share']:8.1%}{value['mean_staleness']:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
