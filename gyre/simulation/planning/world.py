"""What a plan simulates: the executions of a recorded run, or of a stated workload; one draw of them per seed.

All settings meet the same draws, and all run on the devices of the configuration that is planned: a cell that serves
twice as many executions has twice the devices and trains twice as fast, and what moves to the pool no longer trains.
"""

from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from gyre.core.config import load
from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.order import launches_in
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.predictions import predicted_order
from gyre.simulation.recording import Recording, replay_run
from gyre.simulation.stats import RunStats
from gyre.simulation.synthetic import CellTimes
from gyre.simulation.workload import HOUR, WorkloadParams

Seconds = Annotated[float, Meta(ge=0)]
Spread = Annotated[float, Meta(ge=0, le=3)]


class World(Protocol):
    @property
    def described(self) -> str:
        """What is simulated, as the end of "simulated with …"."""
        ...

    @property
    def predicts(self) -> bool:
        """Whether the launch order can know anything of an execution before it starts."""
        ...

    def run(self, config: SchedulerConfig, seed: int) -> RunStats:
        """Deterministic for a seed."""
        ...


class RecordedWorld(msgspec.Struct, frozen=True):
    """Groups of a recorded run, drawn with replacement: another seed is another run of the same tasks. Durations do not
    depend on load. The launch order learns from history, as it does live."""

    recording: Recording
    own: SchedulerConfig
    """Of the recorded run: its micro-steps took their seconds on cells of this size."""

    @property
    def described(self) -> str:
        groups = sum(group.micro_steps is not None for group in self.recording.groups.values())
        return f"the {groups} trained groups of the recorded run, drawn anew for each seed"

    @property
    def predicts(self) -> bool:
        return True

    def run(self, config: SchedulerConfig, seed: int) -> RunStats:
        speed = config.cell_capacity / self.own.cell_capacity if self.own.cell_capacity else 1.0
        return replay_run(self.recording, config, seed=seed, resample=True, cell_speed=speed)


class StatedWorkload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of `gyre plan --workload`; seconds."""

    execution_s: Annotated[float, Meta(gt=0)]
    """Median of an execution, from its launch to the end of its harness, when all places of the engines are taken."""
    training_s: Annotated[float, Meta(gt=0)]
    """Mean time in which one cell of the configuration trains one group."""
    spread_between_tasks: Spread = 0.35
    """Standard deviation of the logarithm of durations between tasks; the default is that of the paper's workload."""
    spread_within_task: Spread = 0.33
    """The same between the executions of a task."""
    limit_s: Annotated[float, Meta(gt=0)] | None = None
    """Time budget of the harness; an execution that reaches it is graded as it is."""
    grading_s: Seconds = 0.0
    load_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of `execution_s` that the engines cause, in proportion to the executions that they serve at a time."""
    micro_steps: Annotated[int, Meta(ge=1)] = 4
    """Per group."""
    update_s: Seconds = 5.0
    publication_s: Seconds = 10.0
    to_training_s: Seconds = 8.5
    to_rollout_s: Seconds = 3.5
    prediction_log_error: Spread | None = None
    """How well the launch order predicts the longest execution of a group: to a factor of exp(error), one standard
    deviation. None: not at all, and `longest_first` is not searched."""


class StatedWorld(msgspec.Struct, frozen=True):
    workload: StatedWorkload
    own: SchedulerConfig
    """The configuration that is planned."""
    graders: int | None = None

    @property
    def described(self) -> str:
        stated = self.workload
        return (
            f"the stated workload (executions of {stated.execution_s:g} s, training of {stated.training_s:g} s a group)"
        )

    @property
    def predicts(self) -> bool:
        return self.workload.prediction_log_error is not None

    @property
    def _unit(self) -> int:
        """Executions that the devices of one of today's cells serve; a node of the model is such a cell."""
        return self.own.cell_capacity or self.own.pool_capacity

    def run(self, config: SchedulerConfig, seed: int) -> RunStats:
        stated = self.workload
        params = WorkloadParams(
            median_h=stated.execution_s / HOUR,
            growth=0.0,
            sigma_query=stated.spread_between_tasks,
            sigma_execution=stated.spread_within_task,
            harness_limit_h=(stated.limit_s or 1e3 * stated.execution_s) / HOUR,
            evaluation_h=stated.grading_s / HOUR,
            graders=self.graders,
            hard_query=0.0,
            load_share=stated.load_share,
            reference_load=float(self._unit),
            work_node_h=stated.training_s / HOUR,
            imbalance=0.0,
            micro_steps=stated.micro_steps,
        )
        times = CellTimes(
            to_training_s=stated.to_training_s,
            to_rollout_s=stated.to_rollout_s,
            publication_s=stated.publication_s,
            update_s=stated.update_s,
        )
        size = config.cell_capacity / self._unit if config.cell_capacity else 1.0
        layout = Layout(cell_nodes=size, pool_nodes=config.pool_capacity / self._unit)
        error = None if launches_in(config) == "fifo" else stated.prediction_log_error
        order = predicted_order(params, seed, config.executions_per_group, error)
        return simulate(config, layout, params, seed=seed, times=times, order=order)


def load_workload(path: Path) -> StatedWorkload:
    """Raises ConfigError naming the file and what is wrong in it."""
    return load(path, (), StatedWorkload)
