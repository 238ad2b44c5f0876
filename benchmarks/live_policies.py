"""Scheduling modes against each other in real `gyre train` runs, at equal budget and mean staleness.

    python benchmarks/live_policies.py [--json OUT] [--steps N] [--mean-s S] [--repeats N]

All modes run at the same time on the same machine, so what disturbs one disturbs all. Real: controller, launcher, RPC,
proxy, tasks, sandboxes, one harness process for each execution (two model calls; its work is a tool command that
sleeps, a heavy-tailed time), graders, journal. Emulated (`emulated_devices.py`): the arithmetic of engines and
trainers, which takes stated times. Every mode has the same nodes; a node serves `PLACES` executions, and a cell of n
nodes trains n times as fast as one. The times of the paper's NL2RepoBench runs are scaled down together, by the mean
time of an execution.

What the simulator expects is computed from the design before any run starts, and is part of the result. The journal of
every run is read again afterwards, by code of its own: staleness identity, waterlevel rule, prefix, capacity, groups
of N.
"""

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gyre.control.base import Environment, Ticket
from gyre.control.controller import Controller
from gyre.core import events as ev
from gyre.harnesses.install import default_root
from gyre.scheduling.config import SchedulerConfig, capacity
from gyre.simulation.clock import VirtualClock, run_virtual
from gyre.simulation.executions import FixedExecutions
from gyre.simulation.stats import RunStats
from gyre.simulation.synthetic import CellTimes, MemoryJournal, SimCells, SimMaterializer
from gyre.store import RunDir

ROOT = Path(__file__).resolve().parent.parent
NODES = 8
PLACES = 6
"""Executions that a node serves."""
GROUPS, EXECUTIONS = 6, 4
TASKS = 16
TRAINING_SHARE = 0.455
"""Node time of training over node time of rollout, per group: the paper's workload as calibrated."""
SIGMA_TASK, SIGMA_OWN, LIMIT = 0.357, 0.328, 1.95
"""Spreads of log durations, and the time budget in medians: the paper's workload as calibrated."""
OVERHEAD_S = 1.0
"""Assumed by the prediction: sandbox, harness start, two calls."""
GRADING_S = 0.5


@dataclass(frozen=True)
class Mode:
    mode: str
    cells: int
    cell_nodes: int
    pool_nodes: int
    extra_dispatch: float
    steps_per_burst: int
    streaming: bool

    def config(self, steps: int) -> SchedulerConfig:
        return SchedulerConfig(
            mode=self.mode,  # type: ignore[arg-type]
            groups_per_step=GROUPS,
            executions_per_group=EXECUTIONS,
            steps_per_burst=self.steps_per_burst,
            extra_dispatch=self.extra_dispatch,
            cells=self.cells,
            cell_capacity=self.cell_nodes * PLACES,
            pool_capacity=self.pool_nodes * PLACES,
            min_supply=1 / GROUPS,
            supply_wait_s=0.5,
            streaming=self.streaming,
            max_steps=steps,
            checkpoint_every=1000,
        )


MODES = {
    "elastic 8×1": Mode("elastic", 8, 1, 0, 0.5, 3, True),
    "coarse 7+1, streaming": Mode("coarse", 1, 7, 1, 0.5, 3, True),
    "async 2+6, streaming": Mode("async", 1, 2, 6, 1.5, 1, True),
    "async 4+4 (the paper's)": Mode("async", 1, 4, 4, 1.5, 1, False),
    "colocate 8": Mode("colocate", 1, 8, 0, 0.0, 4, False),
}
BASE = "elastic 8×1"

HARNESS = r'''
dialect = "chat"
binary = "/usr/bin/python3"
version_command = ["/usr/bin/python3", "-c", "print('1.0')"]
argv = ["/usr/bin/python3", "-S", "-E", "${home}/agent.py"]
stdin = "${instruction}"

[install]
source = "pypi"
package = "sleeper"
version = "1.0"

[env]
OPENAI_BASE_URL = "${base_url}/v1"
OPENAI_API_KEY = "${api_key}"

[files]
"agent.py" = """
import http.client, json, math, os, random, subprocess, sys, time, urllib.parse
began = time.monotonic()
task = sys.stdin.read()
number = int(task.split()[1].rstrip(":"))
shared = random.Random(f"task{number}").gauss(0, SIGMA_TASK)
own = random.SystemRandom().gauss(0, SIGMA_OWN)
seconds = MEDIAN * min(LIMIT, math.exp(shared + own))
url = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
messages = [{"role": "user", "content": task}]
def call():
    for attempt in range(30):
        try:
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
            connection.request("POST", url.path + "/chat/completions", json.dumps({"model": "any", "messages":
            messages}),
                {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
            response = connection.getresponse()
            body = response.read()
            connection.close()
            if response.status == 200:
                return json.loads(body)["choices"][0]["message"]
            print(response.status, body[:200], file=sys.stderr)
        except OSError as error:
            print(error, file=sys.stderr)
        time.sleep(1)
    sys.exit(3)
answer = call()
messages.append({"role": "assistant", "content": answer.get("content") or ""})
time.sleep(max(0.0, seconds - (time.monotonic() - began)))
messages.append({"role": "user", "content": "tool: done"})
call()
open("done.txt", "w").write("%.3f" % seconds)
"""
'''

CONFIG = """
seed = {seed}
[policy]
model = "{model}"
family = "qwen3"
[tasks]
root = "{tasks}"
[harness]
name = "{harness}"
[harness.budgets]
boot_s = 120.0
harness_s = 600.0
evaluation_s = 120.0
overall_s = 1200.0
[rollout]
max_context = 512
max_new_tokens = 8
[engine]
kind = "local"
kv_blocks = 512
[trainer.optimizer]
learning_rate = 1e-6
[admission]
micro_step_tokens = 1
[evaluation]
gradings = 64
"""


def training_s(mean_s: float) -> float:
    """Node-seconds of training of one execution."""
    return TRAINING_SHARE * mean_s / PLACES


def median_s(mean_s: float) -> float:
    """Of the durations whose mean, cut at the limit, is `mean_s`."""
    rng = random.Random(0)
    draws = [min(LIMIT, math.exp(rng.gauss(0, math.hypot(SIGMA_TASK, SIGMA_OWN)))) for _ in range(20_000)]
    return mean_s / statistics.mean(draws)


def predicted(mode: Mode, mean_s: float, steps: int, seed: int) -> float:
    """Seconds, from the design alone: no run is read."""
    stats, median = RunStats(), median_s(mean_s)
    config = mode.config(steps)

    class Numbers:
        def query(self, group: int) -> str:
            order = list(range(TASKS))
            random.Random(f"{seed}/{group // TASKS}").shuffle(order)
            return str(order[group % TASKS])

    def seconds(ticket: Ticket) -> float:
        shared = random.Random(f"task{ticket.query}").gauss(0, SIGMA_TASK)
        own = random.Random(f"{seed}/{ticket.execution_id}").gauss(0, SIGMA_OWN)
        return median * min(LIMIT, math.exp(shared + own)) + OVERHEAD_S

    async def main() -> None:
        clock = VirtualClock()
        times = CellTimes(to_training_s=0.1, to_rollout_s=0.1, publication_s=0.1, update_s=0.1)
        costs = [training_s(mean_s)] * EXECUTIONS
        environment = Environment(
            clock,
            Numbers(),
            FixedExecutions(clock, seconds, lambda _: GRADING_S),
            SimMaterializer(lambda _: costs),
            SimCells(clock, times, nodes=mode.cell_nodes),
            MemoryJournal(stats.read),
        )
        await Controller(config, environment).run()

    run_virtual(main())
    return stats.step_ends[-1] * 3600


def write_world(root: Path, mean_s: float) -> None:
    """Tasks and harness profile."""
    for number in range(TASKS):
        task = root / "tasks" / f"sleep-{number}"
        (task / "environment" / "workspace").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "environment" / "workspace" / "a.txt").write_text("x\n")
        (task / "instruction.md").write_text(f"Task {number}: work for a while.\n")
        grade = 'mkdir -p /logs/verifier\necho "0.$(( (RANDOM % 90) + 10 ))" > /logs/verifier/reward.txt\n'
        (task / "tests" / "test.sh").write_text(grade)
        (task / "task.toml").write_text(
            f'schema_version = "1.4"\n[task]\nname = "gyre/sleep-{number}"\n[agent]\ntimeout_sec = 600.0\n'
            '[verifier]\ntimeout_sec = 120.0\n[environment]\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
        )
    values = {"SIGMA_TASK": SIGMA_TASK, "SIGMA_OWN": SIGMA_OWN, "LIMIT": LIMIT, "MEDIAN": median_s(mean_s)}
    text = HARNESS
    for name, value in values.items():
        text = text.replace(name, f"{value:.6g}")
    (root / "sleeper.toml").write_text(text)
    # The profile installs nothing, but every sandbox sees the directory of its harness.
    (default_root() / "sleeper-1.0").mkdir(parents=True, exist_ok=True)


def start(name: str, mode: Mode, root: Path, mean_s: float, steps: int, seed: int) -> subprocess.Popen[bytes]:
    """One `gyre train` in a process of its own, with emulated devices."""
    file = root / f"{list(MODES).index(name)}.toml"
    section = msgspec.to_builtins(mode.config(steps))
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in section.items())
    model = ROOT / "examples" / "policy" / "tiny"
    text = CONFIG.format(seed=seed, model=model, tasks=root / "tasks", harness=root / "sleeper.toml")
    file.write_text(f"{text}[scheduler]\n{lines}\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "EMULATED_TOKEN_S": "0.005",
        "EMULATED_EXECUTION_S": str(training_s(mean_s)),
        "EMULATED_NODES": str(mode.cell_nodes),
    }
    log = file.with_suffix(".log").open("wb")
    command = [sys.executable, __file__, "--train", str(file), str(file.with_suffix(""))]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def train(config: str, run_dir: str) -> int:
    """In the process that `start` made: the controller and its workers, as on a cluster without a supervisor above."""
    from gyre.api import load_config, prepare
    from gyre.cli.controller import control
    from gyre.control.live import processes
    from gyre.core.running_time import RunningTimeLoop
    from gyre.core.system.programs import raise_open_files
    from gyre.engines.local.config import LocalSection

    processes.TRAINER_ENTRY = "emulated_devices:trainer"
    LocalSection.entry = "emulated_devices:engine"
    with prepare(load_config(Path(config)), config, run_dir=Path(run_dir)) as training:
        raise_open_files()
        with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
            return int(runner.run(control(training.config, training.run_dir, None)))


class Audit:
    """What a journal says, recounted: times, idle shares, and the guarantees, each from the raw events."""

    def __init__(self, events: Iterable[ev.Event], config: SchedulerConfig) -> None:
        self.broken: list[str] = []
        self.steps: list[float] = []
        self._config = config
        self._fixed = config.mode == "async"
        self._d = self._p = self._f = 0
        self._out: set[int] = set(range(config.cells)) if self._fixed else set()
        self._version: dict[int, int] = {}
        self._taken: set[int] = set()
        self._closed: dict[int, int] = {}
        self._staleness = self._unconsumed = self._bursts = self._consumed = 0
        self._at = 0.0
        self._begin: float | None = None
        self._slots = self._slots_used = self._training = self._busy = 0.0
        self._trains: set[int] = set(self._out)
        for event in events:
            self._pass(event.t)
            self._read(event)

    @property
    def result(self) -> dict[str, Any]:
        config, span = self._config, self.steps[-1]
        nodes = config.cells * config.cell_capacity + config.pool_capacity
        # Node time: places of the pool and of cells in rollout, and what cells in training do.
        useful = self._slots_used + self._busy * config.cell_capacity
        return {
            "seconds": span,
            "mean_staleness": self._staleness / self._consumed,
            "idle": 1 - useful / (span * nodes),
            "idle_rollout": 1 - self._slots_used / self._slots,
            "idle_training": 1 - self._busy / self._training if self._training else None,
            "broken": self.broken,
        }

    def _capacity(self) -> int:
        if self._fixed:
            return self._config.pool_capacity
        return capacity(self._config, len(self._out))

    def _pass(self, now: float) -> None:
        if self._begin is not None and len(self.steps) < self._config.max_steps:
            spent = now - self._at
            self._slots += spent * self._capacity()
            self._slots_used += spent * (self._p - self._f)
            self._training += spent * len(self._trains)
        self._at = now

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)

    def _read(self, event: ev.Event) -> None:
        config = self._config
        match event:
            case ev.GroupDispatched():
                self._begin = event.t if self._begin is None else self._begin
                self._d += config.executions_per_group
                self._version[event.group] = event.version
            case ev.ExecutionStarted():
                self._p += 1
                self._demand(self._p - self._f <= self._capacity(), f"{self._p - self._f} run at {event.t:.1f}")
            case ev.ExecutionTerminated():
                self._f += 1
            case ev.ExecutionClosed() if event.cause != "cancelled":
                self._closed[event.group] = self._closed.get(event.group, 0) + 1
            case ev.GroupReady():
                whole = self._closed.get(event.group) == config.executions_per_group
                self._demand(whole, f"group {event.group} is ready before its executions are closed")
            case ev.TransitionStarted(target="training"):
                level = self._d - self._f
                room = self._capacity() - config.cell_capacity
                self._demand(level <= room, f"cell {event.cell} joins at waterlevel {level} > {room}")
                self._demand(event.cell == len(self._out), f"cell {event.cell} joins out of order")
                self._demand(event.waterlevel == level, f"waterlevel {event.waterlevel}, recounted {level}")
                self._out.add(event.cell)
            case ev.TransitionFinished(target="training"):
                self._trains.add(event.cell)
            case ev.TransitionStarted(target="rollout"):
                self._trains.discard(event.cell)
            case ev.TransitionFinished(target="rollout") if event.cell == 0:
                self._out.discard(0)
            case ev.MicroStepDone():
                self._busy += event.seconds
            case ev.StepDone():
                assert self._begin is not None
                self.steps.append(event.t - self._begin)
                for group, staleness in zip(event.groups, event.staleness, strict=True):
                    self._demand(staleness == event.step - 1 - self._version[group], f"staleness of group {group}")
                    self._demand(group not in self._taken, f"group {group} is trained twice")
                    self._taken.add(group)
                    self._staleness += staleness
                    self._consumed += 1
            case ev.Published():
                self._publication(event.version)
            case ev.InvariantBroken():
                self.broken.append(event.detail)
            case _:
                pass

    def _publication(self, version: int) -> None:
        """Σd = μ·ΣP + n·B·μ(μ−1)/2 − A, at a burst of full length."""
        config = self._config
        self._bursts += 1
        left = [group for group in self._version if group not in self._taken]
        self._unconsumed += len(left)
        ages = sum(version - self._version[group] for group in left)
        mu = config.steps_per_burst
        expected = mu * self._unconsumed + self._bursts * config.groups_per_step * mu * (mu - 1) // 2 - ages
        if version % mu == 0:
            self._demand(self._staleness == expected, f"Σd = {self._staleness}, expected {expected} at {version}")
        if not self._fixed:
            self._out &= {0}


def measured(run_dir: Path) -> dict[str, Any]:
    run = RunDir.open(run_dir)
    section = tomllib.loads(run.config.read_text())["scheduler"]
    with run.open_store(read_only=True) as store:
        events = list(store.events())
    return Audit(events, msgspec.convert(section, SchedulerConfig)).result


def repeat(root: Path, mean_s: float, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """All modes at the same time."""
    write_world(root, mean_s)
    runs = {name: start(name, mode, root, mean_s, steps, seed) for name, mode in MODES.items()}
    found: dict[str, dict[str, Any]] = {}
    try:
        for i, (name, process) in enumerate(runs.items()):
            code = process.wait()
            if code:
                log = (root / f"{i}.log").read_text()[-3000:]
                raise SystemExit(f"{name} ended with {code}:\n{log}")
            found[name] = measured(root / str(i))
    finally:
        for process in runs.values():
            if process.poll() is None:
                process.terminate()
                process.wait()
    return found


def report(rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(
        f"{'mode':26}{'seconds':>9}{'/ elastic':>11}{'predicted':>11}{'idle':>7}{'rollout':>9}{'training':>10}", end=""
    )
    print(f"{'mean d':>8}  broken")
    for name, row in rows.items():
        training = "–" if row["idle_training"] is None else f"{row['idle_training']:.0%}"
        print(
            f"{name:26}{row['seconds']:9.1f}{row['ratio']:11.3f}{row['predicted_ratio']:11.3f}{row['idle']:7.0%}"
            f"{row['idle_rollout']:9.0%}{training:>10}{row['mean_staleness']:8.3f}  {len(row['broken'])}"
        )


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        return train(*sys.argv[2:4])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mean-s", type=float, default=20.0, help="mean seconds of an execution")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    expected = {
        name: [predicted(mode, arguments.mean_s, arguments.steps, seed) for seed in range(12)]
        for name, mode in MODES.items()
    }
    print({name: round(statistics.mean(values), 1) for name, values in expected.items()}, "s predicted", flush=True)
    runs: list[dict[str, dict[str, Any]]] = []
    for seed in range(arguments.repeats):
        root = Path(tempfile.mkdtemp(prefix="live-policies-"))
        try:
            runs.append(repeat(root, arguments.mean_s, arguments.steps, seed))
        finally:
            shutil.rmtree(root, ignore_errors=True)
    rows: dict[str, dict[str, Any]] = {}
    for name in MODES:
        values = [run[name] for run in runs]
        mean = {
            key: None if values[0][key] is None else statistics.mean(value[key] for value in values)
            for key in ("seconds", "mean_staleness", "idle", "idle_rollout", "idle_training")
        }
        ratios = [run[name]["seconds"] / run[BASE]["seconds"] for run in runs]
        guess = [own / base for own, base in zip(expected[name], expected[BASE], strict=True)]
        rows[name] = mean | {
            "ratio": statistics.mean(ratios),
            "ratios": ratios,
            "predicted_ratio": statistics.mean(guess),
            "predicted_ratio_sd": statistics.stdev(guess),
            "predicted_seconds": statistics.mean(expected[name]),
            "broken": [sentence for value in values for sentence in value["broken"]],
        }
    report(rows)
    print(f"took {time.monotonic() - began:.0f} s")
    if arguments.json is not None:
        design = {
            "nodes": NODES,
            "places_per_node": PLACES,
            "groups_per_step": GROUPS,
            "executions_per_group": EXECUTIONS,
            "steps": arguments.steps,
            "mean_s": arguments.mean_s,
            "training_node_s_per_execution": training_s(arguments.mean_s),
            "emulated": "arithmetic of engines and trainers",
        }
        arguments.json.write_text(json.dumps({"design": design, "modes": rows}, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
