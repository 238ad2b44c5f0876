"""`gyre simulate --from-run`: a recorded run again. Prints for people and writes JSON on request."""

from pathlib import Path
from typing import Any

import msgspec

from gyre.core.system.output import write_output
from gyre.scheduling.config import SchedulerConfig
from gyre.simulation.recording import load_run, replay_run


def from_run(run: Path, changes: dict[str, Any] | None = None, json_out: Path | None = None) -> dict[str, Any]:
    """A recorded run again: under its own scheduler, and under one with `changes` (keys of `[scheduler]`)."""
    recording, config = load_run(run)
    own = replay_run(recording, config)
    result: dict[str, Any] = {
        "recorded_hours": recording.hours,
        "simulated_hours": own.burst_ends[-1],
        "steps": recording.steps,
    }
    print(
        f"{run}: {recording.steps} steps took {recording.hours * 60:.1f} min; simulated "
        f"{own.burst_ends[-1] * 60:.1f} min ({own.burst_ends[-1] / recording.hours - 1:+.1%})"
    )
    if changes:
        changed = msgspec.convert(msgspec.to_builtins(config) | changes, SchedulerConfig)
        other = replay_run(recording, changed)
        result |= {"changes": changes, "changed_hours": other.burst_ends[-1]}
        gain = other.burst_ends[-1] / own.burst_ends[-1] - 1
        print(f"with {changes}: {other.burst_ends[-1] * 60:.1f} min ({gain:+.1%})")
    if json_out is not None:
        write_output(json_out, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n", "--json")
    return result
