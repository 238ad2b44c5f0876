"""A workload read from the journal of a real run, and that run again under the virtual clock.

Executions take as long as they took (one that the run cut off: at least as long as it had run), and so do micro-steps;
switches, updates, checkpoints and publications take their median. With the run's own scheduler this reproduces the run,
and with another one it answers what-if. It does not know that another load changes durations.
"""

import random
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from gyre.control.base import Environment, ReadyGroup, Ticket
from gyre.control.controller import Controller
from gyre.control.state import parse_execution_id
from gyre.core import events as ev
from gyre.core.errors import ConfigError
from gyre.evaluation import EvaluationSection
from gyre.scheduling.config import SchedulerConfig, require
from gyre.simulation.clock import VirtualClock, run_virtual
from gyre.simulation.executions import FixedExecutions, Graders
from gyre.simulation.stats import RunStats
from gyre.simulation.synthetic import CellTimes, MemoryJournal, SimCells, SimMaterializer
from gyre.simulation.workload import HOUR
from gyre.store import RunDir


class RecordedGroup(msgspec.Struct, frozen=True, kw_only=True):
    query: str
    seconds: dict[int, float]
    """By member, from launch to the end of its harness."""
    grading: dict[int, float]
    """By member that has an outcome, from the end of its harness to the outcome, waiting for a grader apart."""
    cut_off: dict[int, float]
    """By member without an outcome: seconds from its launch to the end of the run, or of its harness."""
    micro_steps: list[float] | None
    """Seconds each; None when the run did not train the group."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    groups: dict[int, RecordedGroup]
    """All dispatched groups, by dispatch number."""
    group_size: int
    """N."""
    times: CellTimes
    steps: int
    hours: float
    """From the first dispatch to the last publication."""
    graders: int | None = None
    """Gradings at a time; None: no execution waits for one."""


def read_recording(events: Iterable[ev.Event]) -> Recording:
    """Raises ConfigError when the journal holds no finished step, or was written by more than one incarnation."""
    queries: dict[int, str] = {}
    durations: dict[int, dict[int, float]] = {}
    grading: dict[int, dict[int, float]] = {}
    terminated: dict[str, float] = {}
    cut_off: dict[int, dict[int, float]] = {}
    trained: set[int] = set()
    ready: dict[int, float] = {}
    processed: list[ev.MicroStepDone] = []
    spans: dict[str, list[float]] = {key: [] for key in CellTimes.__struct_fields__}
    begin: float | None = None
    end = mark = 0.0
    steps = 0
    for event in events:
        match event:
            case ev.RunStarted(resumed_from=int()) | ev.RunWentBack():
                raise ConfigError("This run was resumed; only a run in one piece can be replayed.")
            case ev.GroupDispatched():
                queries[event.group] = event.query
                begin = event.t if begin is None else begin
            case ev.ExecutionTerminated():
                terminated[event.execution_id] = event.seconds
            case ev.ExecutionClosed():
                group, member, _ = parse_execution_id(event.execution_id)
                # A journal of before `execution_terminated`: the execution held its place until it was graded.
                seconds = terminated.pop(event.execution_id, event.seconds)
                ended = cut_off if event.cause == "cancelled" else durations
                ended.setdefault(group, {})[member] = seconds
                if event.cause != "cancelled":
                    graded = max(0.0, event.seconds - seconds - event.waited_s)
                    grading.setdefault(group, {})[member] = graded
            case ev.GroupReady():
                ready[event.group] = event.t
            case ev.TransitionFinished():
                spans["to_training_s" if event.source == "rollout" else "to_rollout_s"].append(event.seconds)
                mark = event.t
            case ev.MicroStepDone():
                processed.append(event)
                mark = event.t
            case ev.MicroStepsReturned():
                processed = [work for work in processed if (work.cell, work.step) != (event.cell, event.step)]
            case ev.StepDone():
                spans["update_s"].append(event.t - max(mark, *(ready[group] for group in event.groups)))
                steps, mark = event.step, event.t
                trained.update(event.groups)
            case ev.CheckpointSaved():
                spans["checkpoint_copy_s"].append(event.copy_seconds)
                spans["checkpoint_write_s"].append(event.write_seconds)
            case ev.Published():
                spans["publication_s"].append(event.seconds)
                end = event.t
            case _:
                pass
    if begin is None or not steps:
        raise ConfigError("The run has not finished a step, so there is nothing to replay.")
    micro_steps: dict[int, list[float]] = {}
    for work in processed:
        micro_steps.setdefault(work.groups[0], []).append(work.seconds)
    groups = {
        group: RecordedGroup(
            query=query,
            seconds=durations.get(group, {}),
            grading=grading.get(group, {}),
            cut_off=cut_off.get(group, {}),
            micro_steps=micro_steps.get(group, []) if group in trained else None,
        )
        for group, query in queries.items()
    }
    group_size = max(len(group.seconds) for group in groups.values())
    # Medians: a transition that had to wait for an update took longer than a switch takes.
    usual = {key: statistics.median(values) if values else 0.0 for key, values in spans.items()}
    hours = (end - begin) / HOUR
    return Recording(groups=groups, group_size=group_size, times=CellTimes(**usual), steps=steps, hours=hours)


def load_run(root: Path) -> tuple[Recording, SchedulerConfig]:
    """Recording and scheduler configuration of a run directory. Raises ConfigError naming it when it cannot be used."""
    run = RunDir.open(root)
    try:
        with run.open_store(read_only=True) as store:
            recording = read_recording(store.events())
        config = msgspec.toml.decode(run.config.read_bytes(), type=_Config)
    except (ConfigError, msgspec.DecodeError) as error:
        raise ConfigError(f"{root}: {error}") from error
    recording = msgspec.structs.replace(recording, graders=config.evaluation.at_a_time)
    return recording, msgspec.structs.replace(config.scheduler, max_steps=recording.steps)


def replay_run(
    recording: Recording,
    config: SchedulerConfig,
    *,
    seed: int = 0,
    resample: bool = False,
    cell_speed: float = 1.0,
    readers: tuple[Callable[[ev.Event], None], ...] = (),
) -> RunStats:
    """The recorded executions under `config`, whose N must be the recorded one. `resample`: every group is a trained
    one of the run, drawn by seed. `cell_speed`: how much faster than a recorded cell one of `config` trains."""
    require(config)
    if recording.group_size != config.executions_per_group:
        raise ConfigError(
            f"scheduler.executions_per_group = {config.executions_per_group} but the recorded groups have "
            f"{recording.group_size} executions."
        )
    stats = RunStats()
    source = _Source(recording, seed, resample)

    async def main() -> None:
        clock = VirtualClock()
        environment = Environment(
            clock,
            source,
            FixedExecutions(clock, source.seconds, source.grading_seconds, Graders(clock, recording.graders)),
            SimMaterializer(source.costs),
            SimCells(clock, recording.times, nodes=cell_speed),
            MemoryJournal(stats.read, *readers),
        )
        await Controller(config, environment).run()

    run_virtual(main())
    return stats


class _Config(msgspec.Struct):
    scheduler: SchedulerConfig
    evaluation: EvaluationSection = EvaluationSection()


class _Source:
    """Recorded groups by number. What the run did not see of a group comes from a trained group, drawn once."""

    def __init__(self, recording: Recording, seed: int, resample: bool) -> None:
        self._groups = {} if resample else recording.groups
        self._trained = [group for group in recording.groups.values() if group.micro_steps is not None]
        self._donors: dict[int, RecordedGroup] = {}
        self._seed = seed

    def query(self, group: int) -> str:
        known = self._groups.get(group)
        return self._donor(group).query if known is None else known.query

    def seconds(self, ticket: Ticket) -> float:
        member, drawn = ticket.member, self._donor(ticket.group).seconds[ticket.member]
        known = self._groups.get(ticket.group)
        if known is None:
            return drawn
        return known.seconds.get(member, max(known.cut_off.get(member, 0.0), drawn))

    def grading_seconds(self, ticket: Ticket) -> float:
        known = self._groups.get(ticket.group)
        graded = known.grading if known else {}
        return graded.get(ticket.member, self._donor(ticket.group).grading[ticket.member])

    def costs(self, group: ReadyGroup) -> list[float]:
        known = self._groups.get(group.group)
        recorded = None if known is None else known.micro_steps
        return (self._donor(group.group).micro_steps or []) if recorded is None else recorded

    def _donor(self, group: int) -> RecordedGroup:
        if group not in self._donors:
            self._donors[group] = random.Random(f"{self._seed}/{group}").choice(self._trained)
        return self._donors[group]
