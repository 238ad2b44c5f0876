"""Rich tables of a run summary, shared by `gyre inspect` and the final report of `gyre train`."""

from collections import Counter

from rich.markup import escape
from rich.table import Table

from gyre.core.drift import RATIO_EDGES, WINDOW
from gyre.core.events import MicroStepsReturned, ProcessLost, ProcessRestarted, StepDone
from gyre.core.records import RoleClass
from gyre.store.summary import ExecutionSummary, RunSummary, mean
from gyre.trajectory.microstep import DISCARDED

MAX_EXECUTIONS = 60


def steps_table(summary: RunSummary) -> Table:
    table = _table("Steps", "step", "reward", "staleness", "log-prob gap mean", "max", "targets", "clipped", "seconds")
    table.add_column("cells", justify="left")
    for step in summary.steps:
        table.add_row(
            str(step.step),
            f"{step.reward_mean:.3f}",
            number(mean(step.staleness)),
            f"{step.logprob_gap_mean:.1e}" if step.logprob_gap_count else "–",
            f"{step.logprob_gap_max:.1e}" if step.logprob_gap_count else "–",
            str(step.targets),
            f"{step.clipped_executions}/{step.executions}",
            f"{step.seconds:.1f}",
            " ".join(map(str, step.cells)),
        )
    return table


def transitions_table(summary: RunSummary) -> Table:
    table = _table("Role transitions", "t", "cell", "from → to", "calls in flight", "rerouted", "with KV", "seconds")
    for event in summary.transitions:
        table.add_row(
            f"{event.t:.1f}",
            str(event.cell),
            f"{event.source} → {event.target}",
            str(event.calls_in_flight),
            str(event.rerouted),
            str(event.with_kv),
            f"{event.seconds:.2f}",
        )
    return table


def joins_table(summary: RunSummary) -> Table:
    table = _table("Satellites that joined a batch under way", "cell", "step", "micro-steps")
    for join in summary.joins:
        table.add_row(str(join.cell), str(join.step), str(join.micro_steps))
    return table


def recovery_table(summary: RunSummary) -> Table:
    table = _table("Processes lost and replaced", "t")
    for name in ("process", "what"):
        table.add_column(name, justify="left")
    for event in summary.recovery:
        match event:
            case ProcessLost():
                row = (event.name, f"[red]lost[/]: {escape(event.detail)}")
            case ProcessRestarted():
                row = (event.name, f"replaced after {event.seconds:.1f} s")
            case MicroStepsReturned():
                row = (f"cell {event.cell}", f"{event.micro_steps} micro-steps of step {event.step} back in the queue")
        table.add_row(f"{event.t:.1f}", *row)
    return table


def executions_table(summary: RunSummary) -> Table:
    """The newest `MAX_EXECUTIONS`; `--json` has all."""
    total = len(summary.executions)
    title = (
        "Executions" if total <= MAX_EXECUTIONS else f"Executions (last {MAX_EXECUTIONS} of {total}; --json has all)"
    )
    table = _table(title, "id", "query", "harness", "v", "outcome", "reward", "seconds", "calls", "nodes")
    table.add_column("leaves (targets)", justify="left")
    for name in ("query", "harness", "outcome"):
        next(column for column in table.columns if column.header == name).justify = "left"
    for execution in summary.executions[-MAX_EXECUTIONS:]:
        table.add_row(
            execution.id,
            execution.query,
            execution.harness,
            "–" if execution.version is None else str(execution.version),
            outcome_text(execution),
            f"{execution.reward:.3f}" if execution.outcome else "–",
            f"{execution.seconds:.1f}" if execution.seconds else "–",
            str(execution.tree.calls),
            str(execution.tree.nodes),
            leaves_text(execution),
        )
    return table


def outcome_text(execution: ExecutionSummary) -> str:
    if execution.outcome is None:
        return "running"
    return f"{execution.outcome.value} ({execution.cause})" if execution.cause else execution.outcome.value


def leaves_text(execution: ExecutionSummary) -> str:
    """ "2 main (310), 1 sub-agent (42)": leaves and their targets by role class."""
    leaves = Counter(leaf.role for leaf in execution.tree.leaves)
    targets: Counter[RoleClass] = Counter()
    for leaf in execution.tree.leaves:
        targets[leaf.role] += leaf.targets
    return ", ".join(f"{leaves[role]} {role.value} ({targets[role]})" for role in RoleClass if leaves[role])


def facts(summary: RunSummary) -> Table:
    """The checks that a run makes of itself, one a row."""
    table = Table.grid(padding=(0, 2))
    table.add_row("run", f"{summary.run_id}, {how_it_ended(summary)}, {summary.seconds / 60:.1f} min")
    rewards = [step.reward_mean for step in summary.steps]
    if rewards:
        quarter = max(1, len(rewards) // 4)
        first, last = mean(rewards[:quarter]) or 0.0, mean(rewards[-quarter:]) or 0.0
        table.add_row(
            "reward", f"{first:.3f} in the first quarter of steps → {last:.3f} in the last ({last - first:+.3f})"
        )
        table.add_row("staleness", f"{number(summary.staleness_mean)} versions on average")
    gaps = [step.logprob_gap_max for step in summary.steps if step.logprob_gap_count]
    gaps += [probe.logprob_gap_max for probe in summary.probes if probe.tokens]
    if gaps:
        table.add_row("log-probs", f"trainer and engine differ by at most {max(gaps):.1e} at equal weights")
    if summary.steps and summary.steps[-1].ratios:
        table.add_row(
            "ratios", f"within 0.5 % of 1 in the last step, by sampled version: {ratios_text(summary.steps[-1])}"
        )
    for alarm in summary.drift[-1:]:
        table.add_row("", f"[red]log-prob gap grew by {alarm.rise:.1e} over {WINDOW} steps until step {alarm.step}[/]")
    outcomes = Counter(execution.outcome.value for execution in summary.executions if execution.outcome)
    closed = ", ".join(f"{count} {validity}" for validity, count in outcomes.most_common()) or "none closed"
    table.add_row("executions", f"{len(summary.executions)} started: {closed}")
    moved = [t for t in summary.transitions if t.target == "training"]
    rerouted = sum(transition.rerouted for transition in summary.transitions)
    with_kv = sum(transition.with_kv for transition in summary.transitions)
    table.add_row(
        "transitions",
        f"{len(moved)} to training, calls rerouted: {rerouted} ({with_kv} with their KV), "
        f"late joins: {len(summary.joins)}",
    )
    proxy = summary.proxy
    table.add_row(
        "proxy",
        f"{proxy.calls} calls, {proxy.retries} retries, {good(proxy.prompt_mismatches)} prompt mismatches, "
        f"{good(proxy.harness_errors_from_transitions)} harness errors from transitions",
    )
    table.add_row("invariants", "[green]all held[/]" if summary.invariants_ok else "[red]broken[/]")
    for broken in summary.broken:
        table.add_row("", f"[red]{broken.t:.1f} s: {broken.name}: {broken.detail}[/]")
    return table


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


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def good(count: int) -> str:
    """A count that must be zero."""
    return f"[green]{count}[/]" if count == 0 else f"[red]{count}[/]"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    table.min_width = len(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
