"""Kills processes of a live run at random and reports what that cost.

    python benchmarks/chaos.py examples/quickstart.toml --kills 20 --seed 1 --json OUT

Real processes and the configured harness. Every few seconds one process, sometimes two, gets SIGKILL or SIGSTOP: the
controller, the core's or a satellite's trainer, an engine, a proxy worker, the runner. The shim, which holds sandboxes,
is left alone unless `--shim` is given: its loss is the loss of its executions. After the last one the run must finish
another step; then it is interrupted in order and its journal is read.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from gyre.cli.commands.inspect import read_summary
from gyre.core import events as ev
from gyre.core.system.output import write_output
from gyre.launch.base import parse_name
from gyre.store import RunDir
from gyre.store.journal import surviving

PATIENCE = (
    "recovery.stall_s=8",
    "recovery.call_s=30",
    "recovery.micro_step_s=30",
    "recovery.pause_s=5",
    "trainer.group_timeout_s=10",
    "scheduler.max_steps=100000",
)
"""So that a process that is stopped counts as hung soon, and the run does not end by itself."""
LOST = ("sandbox_lost", "calls_lost", "runner_error", "boot_failed")
"""Causes that are the platform's."""
SETTLE_S = 240.0
"""For one more step after the last kill."""


class Kill(msgspec.Struct, kw_only=True):
    t: float
    process: str
    kind: str
    signal: str
    phase: str


class Report(msgspec.Struct, kw_only=True):
    kills: list[Kill]
    kills_by_kind: dict[str, int]
    kills_by_phase: dict[str, int]
    steps: int
    executions: int
    executions_lost: int
    lost_by_cause: dict[str, int]
    groups_trained_twice: int
    harness_errors: dict[str, int]
    """Executions whose harness gave up, by harness and cause."""
    invariants_ok: bool
    went_back: int
    controllers: int
    seconds_until_service: dict[str, list[float]]
    """From the loss of a process that was seen to its replacement, by kind."""
    exit_code: int


def kind_of(name: str) -> str:
    base = parse_name(name)[0]
    if base == "trainer-0":
        return "core"
    return {"trainer": "satellite", "proxy": "proxy", "engine": "engine"}.get(base.partition("-")[0], base)


def processes(command: int) -> dict[str, psutil.Process]:
    """Workers of the run by the name of their log, and the controller."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(command).children(recursive=True):
        try:
            line = child.cmdline()
            log = os.path.realpath(f"/proc/{child.pid}/fd/1")
        except (psutil.Error, OSError):
            continue
        if "gyre.cli.controller" in line:
            found["controller"] = child
        elif "gyre.launch.worker" in line and log.endswith(".log"):
            found[Path(log).stem] = child
    return found


def strike(found: dict[str, psutil.Process], rng: random.Random, shim: bool) -> list[tuple[str, int]]:
    """Which processes get which signal; kinds are equally likely."""
    kinds = sorted({kind_of(name) for name in found} - ({"supervisor"} if shim else {"supervisor", "shim"}))
    victims = []
    for kind in rng.sample(kinds, k=min(len(kinds), 2 if rng.random() < 0.2 else 1)):
        name = rng.choice(sorted(name for name in found if kind_of(name) == kind))
        # Nobody but a debugger stops a controller; a stopped one goes on where it was.
        stops = kind != "controller" and rng.random() < 0.25
        victims.append((name, signal.SIGSTOP if stops else signal.SIGKILL))
    return victims


def chaos(arguments: argparse.Namespace, root: Path) -> Report:
    run = RunDir(root / "run")
    log = root / "output"
    with log.open("w") as output:
        command = subprocess.Popen(
            [
                *(sys.executable, "-m", "gyre.cli.main", "train", arguments.config),
                *(*PATIENCE, *arguments.overrides, "--run-dir", str(run.root)),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    rng, kills, begun = random.Random(arguments.seed), [], time.monotonic()
    try:
        wait_for(lambda: f"step {arguments.after}/" in log.read_text(), command, SETTLE_S)
        while len(kills) < arguments.kills and command.poll() is None:
            time.sleep(rng.uniform(0.2, 2 * arguments.every))
            found = processes(command.pid)
            for name, number in strike(found, rng, arguments.shim):
                try:
                    found[name].send_signal(number)
                except psutil.NoSuchProcess:
                    continue
                kill = Kill(
                    t=round(time.monotonic() - begun, 1),
                    process=name,
                    kind=kind_of(name),
                    signal=signal.Signals(number).name,
                    phase=phase_of(log),
                )
                kills.append(kill)
                print(f"{kill.t:7.1f} s  {kill.signal} {name}: {kill.phase}", flush=True)
        done = steps(run)
        wait_for(lambda: steps(run) > done, command, SETTLE_S)
    finally:
        interrupted = len(journal(run))
        if command.poll() is None:
            command.send_signal(signal.SIGTERM)
        code = command.wait(timeout=120)
        if code not in (0, 130):
            print(log.read_text()[-3000:], file=sys.stderr)
    return read(run, kills, interrupted, code)


def wait_for(true: Callable[[], bool], command: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true() and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)


def phase_of(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if " step " in line]
    return re.sub(r"\d+", "N", lines[-1].rpartition(": ")[2]) if lines else "starting"


def journal(run: RunDir) -> list[ev.Event]:
    if not run.database.exists():
        return []
    with run.open_store(read_only=True) as store:
        return list(store.events())


def steps(run: RunDir) -> int:
    return sum(isinstance(event, ev.StepDone) for event in journal(run))


def read(run: RunDir, kills: list[Kill], interrupted: int, code: int) -> Report:
    with run.open_store(read_only=True) as store:
        events = list(store.events())
        summary = read_summary(store)
    before = events[:interrupted]
    closed = [event for event in events if isinstance(event, ev.ExecutionClosed)]
    cut = [event for event in before if isinstance(event, ev.ExecutionClosed) and event.cause == "cancelled"]
    harness = {e.execution_id: e.harness for e in events if isinstance(e, ev.ExecutionStarted)}
    unended = harness.keys() - {event.execution_id for event in closed}
    lost = Counter(event.cause for event in closed if event.cause in LOST)
    lost += Counter({"cancelled": len(cut), "unended": len(unended)})
    line = [event for event in surviving(events) if isinstance(event, ev.StepDone)]
    trained = Counter(group for step in line for group in step.groups)
    service: dict[str, list[float]] = {}
    for event in events:
        if isinstance(event, ev.ProcessRestarted):
            service.setdefault(kind_of(event.name), []).append(round(event.seconds, 2))
    errors = Counter(f"{harness[e.execution_id]}: {e.cause}" for e in closed if e.cause == "harness_exit")
    return Report(
        kills=kills,
        kills_by_kind=dict(Counter(kill.kind for kill in kills)),
        kills_by_phase=dict(Counter(kill.phase for kill in kills)),
        steps=len(line),
        executions=len(harness),
        executions_lost=sum(lost.values()),
        lost_by_cause=dict(lost),
        groups_trained_twice=sum(count > 1 for count in trained.values()),
        harness_errors=dict(errors),
        invariants_ok=summary.invariants_ok,
        went_back=sum(isinstance(event, ev.RunWentBack) for event in events),
        controllers=sum(isinstance(event, ev.RunStarted) for event in events),
        seconds_until_service=service,
        exit_code=code,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="key=value, as for gyre train")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two kills")
    parser.add_argument("--after", type=int, default=1, help="steps before the first kill; 0: while the run starts")
    parser.add_argument("--shim", action="store_true", help="kill the shim too, and with it its executions")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-chaos-") as root:
        report = chaos(arguments, Path(root))
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if arguments.json:
        write_output(arguments.json, text + b"\n", "--json")
    print(text.decode())
    sound = report.invariants_ok and not report.groups_trained_twice and report.exit_code in (0, 130)
    return 0 if sound and (arguments.shim or not report.executions_lost) else 1


if __name__ == "__main__":
    sys.exit(main())
