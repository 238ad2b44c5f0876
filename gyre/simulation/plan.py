"""`gyre plan`: the sentences of `gyre.scheduling.plan`, and what the simulator expects of this and similar settings."""

from collections.abc import Callable

import msgspec

from gyre.scheduling.config import SchedulerConfig, problems, require
from gyre.scheduling.plan import explain
from gyre.scheduling.staleness import expected_staleness
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.recording import Recording, replay_run
from gyre.simulation.workload import WorkloadParams

PLAN_STEPS = 12
MOST_EXECUTIONS = 100_000
MOST_ENGINES = 1_000
"""What a simulation of `gyre plan` may hold, so that it ends in minutes."""
BURSTS = (1, 2, 3, 4, 6)
"""Steps per burst to compare with: whole bursts in the simulated steps."""


def alternatives(config: SchedulerConfig) -> list[SchedulerConfig]:
    """Accepted settings of the same mean staleness: other (φ, μ), and half or twice the cells on the same capacity."""
    mean = expected_staleness(extra_dispatch=config.extra_dispatch, steps_per_burst=config.steps_per_burst)
    found = [
        msgspec.structs.replace(config, extra_dispatch=mean - (mu - 1) / 2, steps_per_burst=mu)
        for mu in BURSTS
        if mu != config.steps_per_burst and mean >= (mu - 1) / 2
    ]
    if config.mode == "elastic":
        if config.cells % 2 == 0:
            found.append(
                msgspec.structs.replace(config, cells=config.cells // 2, cell_capacity=config.cell_capacity * 2)
            )
        if config.cell_capacity % 2 == 0:
            found.append(
                msgspec.structs.replace(config, cells=config.cells * 2, cell_capacity=config.cell_capacity // 2)
            )
    return [candidate for candidate in found if not problems(candidate)]


def modelled_hours(config: SchedulerConfig, params: WorkloadParams | None = None) -> float:
    """Hours per step with executions like the paper's; a node is what serves 36 of them."""
    params = params or WorkloadParams()
    nodes = config.cell_capacity / params.reference_load
    scaled = msgspec.structs.replace(params, work_node_h=params.work_node_h * config.executions_per_group / 16)
    steps = _steps(config)
    layout = Layout(cell_nodes=nodes, pool_nodes=config.pool_capacity / params.reference_load)
    return simulate(msgspec.structs.replace(config, max_steps=steps), layout, scaled, seed=0).step_ends[-1] / steps


def recorded_hours(recording: Recording) -> Callable[[SchedulerConfig], float]:
    """Hours per step with the executions of a recorded run."""

    def hours(config: SchedulerConfig) -> float:
        steps = _steps(config)
        return replay_run(recording, msgspec.structs.replace(config, max_steps=steps)).step_ends[-1] / steps

    return hours


def plan(config: SchedulerConfig, recording: Recording | None = None, *, graders: int | None = None) -> str:
    """What the configuration means and how it compares, with so many gradings at a time (None: no bound). Raises
    ConfigError when it cannot run."""
    require(config)
    if recording is None and not config.cell_capacity:
        return explain(config) + "\n\nNot simulated: scheduler.cell_capacity = 0 does not tell how large a cell is."
    if reason := _too_large(config):
        return explain(config) + f"\n\nNot simulated: {reason}."
    params = WorkloadParams(graders=graders)
    hours = (
        (lambda setting: modelled_hours(setting, params))
        if recording is None
        else recorded_hours(msgspec.structs.replace(recording, graders=graders))
    )
    workload = (
        "executions like the paper's NL2RepoBench (mean 1.93 h)" if recording is None else "the recorded executions"
    )
    own = hours(config)
    lines = [
        f"Simulated with {workload}, {_steps(config)} steps: {_duration(own)} per step.",
        "Same mean staleness:",
        f"{'φ':>6}{'μ':>4}{'cells':>5}{'cell_capacity':>6}{'per step':>12}{'':>4}",
    ]
    for candidate in [config, *alternatives(config)]:
        taken = own if candidate is config else hours(candidate)
        note = "this configuration" if candidate is config else f"{taken / own - 1:+.1%}"
        lines.append(
            f"{candidate.extra_dispatch:6g}{candidate.steps_per_burst:4}{candidate.cells:5}{candidate.cell_capacity:6}"
            f"{_duration(taken):>12}    {note}"
        )
    return explain(config) + "\n\n" + "\n".join(lines)


def _too_large(config: SchedulerConfig) -> str:
    """Why the configuration would keep the simulator busy for too long; "" when it would not."""
    executions = (_steps(config) * config.groups_per_step + config.depth) * config.executions_per_group
    engines = config.cells + (config.pool_engines if config.pool_capacity else 0)
    if executions > MOST_EXECUTIONS:
        return f"{_steps(config)} steps have up to {executions} executions, and at most {MOST_EXECUTIONS} are simulated"
    if engines > MOST_ENGINES:
        return f"K and pool_engines are {engines} engines, and at most {MOST_ENGINES} are simulated"
    return ""


def _steps(config: SchedulerConfig) -> int:
    return -(-PLAN_STEPS // config.steps_per_burst) * config.steps_per_burst


def _duration(hours: float) -> str:
    return f"{hours:.2f} h" if hours >= 0.5 else f"{hours * 3600:.0f} s"
