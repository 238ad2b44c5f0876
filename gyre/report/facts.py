"""The checks that a run makes of itself, each a sentence: the end of `gyre inspect` and the head of the overview."""

from collections import Counter
from typing import Literal

import msgspec

from gyre.core.drift import RATIO_EDGES, WINDOW
from gyre.core.events import StepDone
from gyre.report.summary import RunSummary, mean
from gyre.report.tables import number
from gyre.samples.microstep import DISCARDED


class Fact(msgspec.Struct, frozen=True):
    name: str
    """"" when it belongs to the fact before it."""
    text: str
    tone: Literal["", "good", "bad"] = ""


def facts(summary: RunSummary) -> list[Fact]:
    outcomes = Counter(execution.outcome.value for execution in summary.executions if execution.outcome)
    closed = ", ".join(f"{count} {validity}" for validity, count in outcomes.most_common()) or "none closed"
    moved = sum(transition.target == "training" for transition in summary.transitions)
    rerouted = sum(transition.rerouted for transition in summary.transitions)
    with_kv = sum(transition.with_kv for transition in summary.transitions)
    proxy = summary.proxy
    held = summary.invariants_ok
    return [
        Fact("run", f"{summary.run_id}, {how_it_ended(summary)}, {summary.seconds / 60:.1f} min"),
        *_of_steps(summary),
        Fact("executions", f"{len(summary.executions)} started: {closed}"),
        Fact(
            "transitions",
            f"{moved} to training, calls rerouted: {rerouted} ({with_kv} with their KV), "
            f"late joins: {len(summary.joins)}",
        ),
        Fact(
            "proxy",
            f"{proxy.calls} calls, {proxy.retries} retries, {proxy.prompt_mismatches} prompt mismatches, "
            f"{proxy.harness_errors_from_transitions} harness errors from transitions",
            "bad" if proxy.prompt_mismatches or proxy.harness_errors_from_transitions else "",
        ),
        Fact("invariants", "all held" if held else "broken", "good" if held else "bad"),
        *(Fact("", f"{broken.t:.1f} s: {broken.name}: {broken.detail}", "bad") for broken in summary.broken),
    ]


def ratios_text(step: StepDone) -> str:
    """ "v4 99.8 % of 1200, v5 100.0 % of 310": targets whose importance ratio is within the clip edges of 1."""
    middle = RATIO_EDGES.index(1.005)
    names = {version: "lost weights" if version == DISCARDED else f"v{version}" for version in step.ratios}
    return ", ".join(
        f"{names[version]} {100 * counts[middle] / sum(counts):.1f} % of {sum(counts)}"
        for version, counts in sorted(step.ratios.items())
    )


def how_it_ended(summary: RunSummary) -> str:
    text: str = "not finished" if summary.finished is None else summary.finished.reason
    if summary.finished is not None and summary.finished.detail:
        text += f" ({summary.finished.detail})"
    return text if summary.parts == 1 else f"{text}, resumed {summary.parts - 1}×"


def _of_steps(summary: RunSummary) -> list[Fact]:
    told = []
    rewards = [step.reward_mean for step in summary.steps]
    if rewards:
        quarter = max(1, len(rewards) // 4)
        first, last = mean(rewards[:quarter]) or 0.0, mean(rewards[-quarter:]) or 0.0
        change = f"{first:.3f} in the first quarter of steps → {last:.3f} in the last ({last - first:+.3f})"
        told.append(Fact("reward", change))
        told.append(Fact("staleness", f"{number(summary.staleness_mean)} versions on average"))
    gaps = [step.logprob_gap_max for step in summary.steps if step.logprob_gap_count]
    gaps += [probe.logprob_gap_max for probe in summary.probes if probe.tokens]
    if gaps:
        told.append(Fact("log-probs", f"trainer and engine differ by at most {max(gaps):.1e} at equal weights"))
    if summary.steps and summary.steps[-1].ratios:
        within = f"within 0.5 % of 1 in the last step, by sampled version: {ratios_text(summary.steps[-1])}"
        told.append(Fact("ratios", within))
    replayed = sum(step.replayed for step in summary.steps)
    computed = replayed + sum(step.unrecorded for step in summary.steps)
    if computed:
        told.append(Fact("experts", f"replayed for {100 * replayed / computed:.1f} % of {computed} computed tokens"))
    for alarm in summary.drift[-1:]:
        grew = f"log-prob gap grew by {alarm.rise:.1e} over {WINDOW} steps until step {alarm.step}"
        told.append(Fact("", grew, "bad"))
    return told
