"""A plan for people and machines: sentences and a table, a picture, JSON. A difference is given as exactly as it is
known: whole per cent when its standard error is one per cent or more."""

import io
from typing import Any

import msgspec
from matplotlib.figure import Figure

from gyre.simulation.planning.search import Measured, Plan, gain, steps_of

KEYS = (
    "extra_dispatch",
    "steps_per_burst",
    "cells",
    "cell_capacity",
    "pool_capacity",
    "min_supply",
    "supply_wait_s",
    "launch_order",
)
"""What the search changes."""
HEADS = ("φ", "μ", "K", "C_e", "C_s", "ρ_min", "τ", "order")
SURE = 2.0
"""A difference counts from so many standard errors on."""


def table(plan: Plan, described: str) -> str:
    """Paragraph and table."""
    own, seeds = plan.own, len(plan.own.hours)
    ended = "nothing new was left to try" if plan.complete else "the budget ended the search"
    lines = [
        f"Simulated with {described}. {plan.tried} settings on the same devices in {plan.seconds:.0f} s; {ended}.",
        f"Each line: {seeds} other seeds (the same for all), {steps_of(own.config)} steps or a few more (whole "
        "bursts), ± standard error; differences are paired by seed.",
        "",
        f"{'E[d]':>6}{HEADS[0]:>6}{HEADS[1]:>4}{HEADS[2]:>4}{HEADS[3]:>6}{HEADS[4]:>6}{HEADS[5]:>8}{HEADS[6]:>6}"
        f"  {HEADS[7]:14}{'per step':>20}   difference",
        *(_line(one, own) for one in ([] if own in plan.front else [own])),
        *(_line(one, own) for one in plan.front),
    ]
    return "\n".join([*lines, "", verdict(plan)])


def _line(one: Measured, own: Measured) -> str:
    config = one.config
    if one is own or config == own.config:
        note = "this configuration"
    else:
        mean, error = gain(one, own)
        note = percent(mean, error)
    return (
        f"{one.staleness:6.3g}{config.extra_dispatch:6g}{config.steps_per_burst:4}{config.cells:4}"
        f"{config.cell_capacity:6}{config.pool_capacity:6}{config.min_supply:8.3g}{config.supply_wait_s:6g}"
        f"  {config.launch_order:14}{duration(one.mean, one.error):>20}   {note}"
    )


def verdict(plan: Plan) -> str:
    """What to do, in a sentence."""
    best = min(plan.front, key=lambda one: one.mean, default=plan.own)
    changed = changes(best, plan.own)
    if not changed:
        return "No setting was faster."
    mean, error = gain(best, plan.own)
    if mean > -SURE * error:
        return f"No setting is faster by more than {len(plan.own.hours)} seeds can tell ({percent(mean, error)})."
    overrides = " ".join(f"scheduler.{key}={value}" for key, value in changed.items())
    return f"Fastest: {overrides} ({percent(mean, error)})."


def changes(one: Measured, own: Measured) -> dict[str, Any]:
    """Keys whose values differ, as overrides of a configuration."""
    return {key: getattr(one.config, key) for key in KEYS if getattr(one.config, key) != getattr(own.config, key)}


def percent(mean: float, error: float) -> str:
    """A relative difference with its standard error."""
    digits = 0 if error >= 0.01 else 1
    return f"{100 * mean:+.{digits}f} ± {100 * error:.{digits}f} %"


def duration(hours: float, error: float) -> str:
    unit, scale = ("h", 1.0) if hours >= 0.5 else ("s", 3600.0)
    value, spread = hours * scale, error * scale
    digits = 0 if spread >= 1 else (1 if spread >= 0.1 else 2)
    return f"{value:.{digits}f} ± {spread:.{digits}f} {unit}"


def as_json(plan: Plan, described: str) -> bytes:
    def entry(one: Measured) -> dict[str, Any]:
        mean, error = gain(one, plan.own)
        return {
            "staleness": one.staleness,
            "scheduler": {key: getattr(one.config, key) for key in KEYS},
            "hours_per_step": one.mean,
            "standard_error": one.error,
            "gain": mean,
            "gain_standard_error": error,
            "hours_by_seed": one.hours,
        }

    content = {
        "workload": described,
        "steps": steps_of(plan.own.config),
        "seeds": len(plan.own.hours),
        "settings_tried": plan.tried,
        "complete": plan.complete,
        "seconds": plan.seconds,
        "own": entry(plan.own),
        "front": [entry(one) for one in plan.front],
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def picture(plan: Plan, kind: str) -> bytes:
    """Staleness against time per step, as "png" or "svg"."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    front, own = plan.front, plan.own
    axes.errorbar(
        [one.staleness for one in front],
        [one.mean for one in front],
        yerr=[one.error for one in front],
        marker="o",
        drawstyle="steps-post",
        label="Pareto front",
    )
    axes.errorbar([own.staleness], [own.mean], yerr=[own.error], marker="s", linestyle="", label="this configuration")
    for one in front:
        config = one.config
        text = f"({config.extra_dispatch:g}, {config.steps_per_burst}), {config.cells}×{config.cell_capacity}"
        axes.annotate(text, (one.staleness, one.mean), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set_xlabel("mean staleness E[d] in versions")
    axes.set_ylabel("hours per step")
    axes.legend(frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=130)
    return drawn.getvalue()
