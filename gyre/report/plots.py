"""The pictures of a run, from its journal: reward, staleness, and the cell-role timeline. Each is a figure; `save` and
`svg` make it a file or a response. Nothing in them is read as math, whatever a run is called."""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gyre.core.events import Event, Published, StepDone
from gyre.report.summary import RunSummary, mean
from gyre.report.text import visible
from gyre.report.timeline import Activity, ready_groups, role_spans, waterlevels
from gyre.store.journal import surviving

COLOURS: dict[Activity, str] = {"rollout": "#4c78a8", "training": "#f58518", "transition": "#bab0ac"}
MAX_STEP_LABELS = 24
DPI = 130


def save(figure: Figure, path: Path) -> None:
    """The suffix of `path` says the format."""
    figure.savefig(path, dpi=DPI)


def svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def reward_figure(summary: RunSummary) -> Figure:
    """Mean reward of every step, a centred moving mean, and the level before any training."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    steps = [step.step for step in summary.steps]
    rewards = [step.reward_mean for step in summary.steps]
    if summary.initial_reward is not None:
        axes.axhline(summary.initial_reward, color="0.5", linestyle=":", label="before training (version 0)")
    axes.plot(steps, rewards, "o", color=COLOURS["rollout"], alpha=0.45, markersize=5, label="one step")
    half = max(1, len(rewards) // 12)
    if len(rewards) > 2 * half:
        axes.plot(
            steps, moving_mean(rewards, half), color=COLOURS["rollout"], linewidth=2, label=f"mean of {2 * half + 1}"
        )
    axes.set(xlabel="optimizer step", ylabel="mean reward")
    axes.set_title(f"Reward of {visible(summary.run_id)}", parse_math=False)
    axes.set_ylim(min(0.0, *rewards, 0.0) - 0.03, max(1.0, *rewards, 1.0) + 0.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    return figure


def staleness_figure(summary: RunSummary) -> Figure:
    """Versions between dispatch and consumption: every group of a step, and their mean."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.subplots()
    groups = [(step.step, staleness) for step in summary.steps for staleness in step.staleness]
    axes.plot(
        [step for step, _ in groups],
        [staleness for _, staleness in groups],
        "o",
        color=COLOURS["transition"],
        markersize=4,
        label="one group",
    )
    means = [mean(step.staleness) or 0.0 for step in summary.steps]
    axes.plot([step.step for step in summary.steps], means, color=COLOURS["training"], linewidth=2, label="mean")
    axes.set(xlabel="optimizer step", ylabel="staleness (versions)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=-0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def timeline_figure(events: Sequence[Event], since: float = 0.0) -> Figure:
    """Above: the role of every cell over time, with the ends of steps and the publications. Below: the waterlevel
    w = d − f, the executions that run, the capacity C_R, and the ready groups. `events` are on one axis
    (`gyre.store.journal`); what ended before `since` seconds is left out."""
    spans = {cell: [span for span in of_cell if span.end >= since] for cell, of_cell in role_spans(events).items()}
    height = 0.42 * max(2, len(spans)) + 0.4
    figure = Figure(figsize=(10, 3.7 + height), layout="constrained")
    roles, water, ready = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.7, 0.9])
    for cell, of_cell in spans.items():
        for activity, colour in COLOURS.items():
            bars = [(span.start, span.end - span.start) for span in of_cell if span.activity == activity]
            roles.broken_barh(bars, (cell - 0.36, 0.72), facecolor=colour, linewidth=0)
    _mark_steps(roles, [event for event in surviving(events) if event.t >= since])
    roles.set_yticks(list(spans), [f"cell {cell}" + (" (core)" if cell == 0 else "") for cell in spans])
    roles.set_ylim(max(spans, default=1) + 0.6, -0.6)
    roles.spines[["top", "right", "left"]].set_visible(False)
    roles.tick_params(left=False)
    handles: list[Artist] = [Patch(color=colour, label=activity) for activity, colour in COLOURS.items()]
    handles.append(Line2D([], [], color="black", linewidth=1, label="step"))
    handles.append(Line2D([], [], color="black", marker="v", linestyle="", markersize=5, label="publication"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    _draw_water(water, events, since)
    _draw_ready(ready, events, since)
    roles.set_xlim(since, max(since + 1, *(event.t for event in events)))
    return figure


def moving_mean(values: Sequence[float], half: int) -> list[float]:
    """Mean over up to `half` neighbours on each side; narrower at the ends."""
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _mark_steps(axes: Axes, line: Sequence[Event]) -> None:
    steps = [event for event in line if isinstance(event, StepDone)]
    every = -(-len(steps) // MAX_STEP_LABELS) if steps else 1
    above = axes.get_xaxis_transform()
    for step in steps:
        axes.axvline(step.t, color="black", linewidth=0.7)
        if step.step % every == 0:
            axes.text(step.t, 1.06, str(step.step), transform=above, ha="center", va="bottom", fontsize=7)
    published = [event.t for event in line if isinstance(event, Published)]
    if published:  # nothing, outside of the axes, has an extent that the layout cannot use
        axes.plot(published, [1.03] * len(published), "v", color="black", markersize=4, transform=above, clip_on=False)


def _draw_water(axes: Axes, events: Sequence[Event], since: float) -> None:
    levels = [level for level in waterlevels(events) if level.t >= since]
    t = [level.t for level in levels]
    capacity = [level.capacity for level in levels]
    axes.fill_between(t, capacity, step="post", color="0.9", linewidth=0, label="capacity C_R")
    axes.step(t, [level.running for level in levels], where="post", color="0.45", linewidth=1, label="running p − f")
    axes.step(t, [level.waterlevel for level in levels], where="post", color="#54a24b", label="waterlevel w = d − f")
    axes.set_ylabel("executions")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_ready(axes: Axes, events: Sequence[Event], since: float) -> None:
    curve = [point for point in ready_groups(events) if point[0] >= since]
    axes.step([t for t, _ in curve], [count for _, count in curve], where="post", color=COLOURS["training"])
    axes.set(xlabel="seconds", ylabel="ready groups")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
