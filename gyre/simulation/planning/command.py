"""The command `gyre plan`: sentences on any configuration, and a search when the workload is known."""

import sys
from pathlib import Path

import msgspec

from gyre.core.errors import ConfigError
from gyre.core.system.output import write_output
from gyre.scheduling.config import SchedulerConfig, require
from gyre.scheduling.plan import explain
from gyre.simulation.planning.candidates import staleness_of
from gyre.simulation.planning.report import as_json, duration, picture, table
from gyre.simulation.planning.search import Plan, search, steps_of
from gyre.simulation.planning.world import RecordedWorld, StatedWorld, World, load_workload
from gyre.simulation.recording import load_run

MOST_EXECUTIONS = 100_000
MOST_ENGINES = 1_000
"""What one simulation may hold, so that it ends within seconds."""
WIDEST = 3.0
"""Mean staleness up to which a search for a time per step goes."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    from_run: Path | None = None
    workload: Path | None = None
    staleness: float | None = None
    """Mean staleness allowed; default: the configuration's own."""
    hours_per_step: float | None = None
    """Look for the freshest setting that is this fast, instead."""
    seconds: float = 60.0
    seeds: int = 8
    json: Path | None = None
    plot: Path | None = None


def plan(config: SchedulerConfig, request: Request = Request(), *, graders: int | None = None) -> str:
    """What the configuration means and how it compares, with so many gradings at a time (None: no bound). Raises
    ConfigError when it cannot run."""
    require(config)
    text = explain(config)
    if reason := _not_simulated(config, request):
        if request.json or request.plot:
            raise ConfigError(f"nothing was simulated, so there is nothing to write: {reason}")
        return f"{text}\n\nNot simulated: {reason}"
    world = _world(config, request, graders)
    bound = staleness_of(config) if request.staleness is None else request.staleness
    if request.hours_per_step is not None:
        bound = max(bound, WIDEST)
    report = _Progress()
    found = search(world, config, staleness=bound, budget_s=request.seconds, seeds=request.seeds, report=report.show)
    report.clear()
    if request.json is not None:
        write_output(request.json, as_json(found, world.described), "--json")
    if request.plot is not None:
        write_output(request.plot, picture(found, _kind(request.plot)), "--plot")
    parts = [text, table(found, world.described)]
    if request.hours_per_step is not None:
        parts.append(freshest(found, request.hours_per_step))
    return "\n\n".join(parts)


def freshest(found: Plan, hours: float) -> str:
    """The setting of least staleness whose mean time per step is at most `hours`."""
    fast = [one for one in found.front if one.mean <= hours]
    if not fast:
        return f"No setting takes at most {duration(hours, 0.0).partition(' ')[0]} per step."
    one = fast[0]
    return (
        f"Freshest at {hours:g} h per step or less: E[d] = {one.staleness:g} with extra_dispatch = "
        f"{one.config.extra_dispatch:g}, steps_per_burst = {one.config.steps_per_burst} "
        f"({duration(one.mean, one.error)} per step)."
    )


def _world(config: SchedulerConfig, request: Request, graders: int | None) -> World:
    if request.from_run is not None:
        recording, own = load_run(request.from_run)
        return RecordedWorld(msgspec.structs.replace(recording, graders=graders), own)
    assert request.workload is not None
    return StatedWorld(load_workload(request.workload), config, graders)


def _not_simulated(config: SchedulerConfig, request: Request) -> str:
    """Why there is no simulation; "" when there is one."""
    if request.from_run is None and request.workload is None:
        return (
            "hours depend on how long executions and training take; give a recorded run (--from-run RUN) or a stated "
            "workload (--workload FILE, docs/scheduling.md)."
        )
    executions = (steps_of(config) * config.groups_per_step + config.depth) * config.executions_per_group
    engines = config.cells + (config.pool_engines if config.pool_capacity else 0)
    if executions > MOST_EXECUTIONS:
        return (
            f"{steps_of(config)} steps have up to {executions} executions, and at most {MOST_EXECUTIONS} are simulated."
        )
    if engines > MOST_ENGINES:
        return f"cells and pool_engines are {engines} engines, and at most {MOST_ENGINES} are simulated."
    return ""


def _kind(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise ConfigError(f"{path} is no .png or .svg file: choose another one for --plot.")
    return kind


class _Progress:
    """One line on stderr that is written over; nothing when stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def show(self, line: str) -> None:
        if self._shown:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
