"""The picture of a simulated run: roles of the cells, waterlevel and capacity, ready groups, over time."""

import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from gyre.core.events import Event, StepDone
from gyre.report.timeline import ready_groups, role_spans, waterlevels
from gyre.simulation.workload import HOUR

COLOURS = {"rollout": "#4c78a8", "training": "#f58518", "transition": "#bab0ac"}


def draw(events: Sequence[Event], title: str, kind: str) -> bytes:
    """A file of this kind: "png" or "svg"."""
    spans = role_spans(events)
    figure = Figure(figsize=(11, 5 + 0.22 * len(spans)), layout="constrained")
    roles, water, ready = figure.subplots(3, 1, sharex=True, height_ratios=[1 + 0.22 * len(spans), 2, 1.2])
    for cell, of_cell in spans.items():
        for span in of_cell:
            width = (span.end - span.start) / HOUR
            roles.barh(cell, width, left=span.start / HOUR, height=0.8, color=COLOURS[span.activity], linewidth=0)
    roles.set_yticks(list(spans), [f"cell {cell}" for cell in spans])
    roles.invert_yaxis()
    roles.set_title(f"{title}: rollout (blue), training (orange)")
    for event in events:
        if isinstance(event, StepDone):
            roles.axvline(event.t / HOUR, color="0.3", linewidth=0.6)
    levels = waterlevels(events)
    hours = [level.t / HOUR for level in levels]
    water.step(hours, [level.waterlevel for level in levels], where="post", label="waterlevel d − f")
    water.step(hours, [level.running for level in levels], where="post", label="running p − f")
    water.step(
        hours, [level.capacity for level in levels], where="post", label="capacity C_R", color="0.4", linestyle=":"
    )
    water.set_ylabel("executions")
    water.legend(frameon=False)
    curve = ready_groups(events)
    ready.step([at / HOUR for at, _ in curve], [count for _, count in curve], where="post")
    ready.set_ylabel("ready groups")
    ready.set_xlabel("hours")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=130)
    return drawn.getvalue()
