"""The steps of a run as TensorBoard scalars; TensorBoard is installed by whoever wants it."""

from pathlib import Path

from gyre.core.errors import ConfigError
from gyre.core.events import StepDone
from gyre.report.summary import RunSummary, mean


def scalars(step: StepDone) -> dict[str, float]:
    """By tag; the log-prob gaps only where they were measured."""
    values = {
        "reward": step.reward_mean,
        "staleness": mean(step.staleness) or 0.0,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "clipped": step.clipped_executions / step.executions if step.executions else 0.0,
        "targets": float(step.targets),
        "seconds": step.seconds,
        "cells": float(len(step.cells)),
    }
    if step.logprob_gap_count:
        values |= {"logprob_gap/mean": step.logprob_gap_mean, "logprob_gap/max": step.logprob_gap_max}
    return values


def write(summary: RunSummary, directory: Path) -> int:
    """Writes the surviving steps, with the run's clock as wall time, and returns how many.

    Raises ConfigError when TensorBoard is not installed or `directory` holds something."""
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        raise ConfigError(f"--tensorboard needs a package ({error}): pip install tensorboard.") from error
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"{directory} is not an empty directory: choose another one for --tensorboard.")
    writer = Writer(str(directory))
    for step in summary.steps:
        for tag, value in scalars(step).items():
            writer.add_scalar(tag, value, step.step, wall_time=step.t)
    writer.close()
    return len(summary.steps)
