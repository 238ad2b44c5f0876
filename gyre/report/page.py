"""One self-contained HTML page on a run, to send to somebody: no script, no request, everything escaped."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader

from gyre.core.events import Event
from gyre.report import plots
from gyre.report.facts import facts
from gyre.report.summary import RunSummary
from gyre.report.tables import Table, executions_table, joins_table, recovery_table, steps_table, transitions_table
from gyre.report.text import visible
from gyre.report.timeline import role_spans
from gyre.store.journal import on_one_axis

MAX_EXECUTIONS = 500
"""Rows of the newest executions; more make a file that mail programs refuse."""


def report_page(summary: RunSummary, events: Sequence[Event], config_text: str) -> str:
    """Pure. `config_text`: the run's effective configuration."""
    line = on_one_axis(events)
    pictures = []
    if summary.steps:
        pictures += [plots.reward_figure(summary), plots.staleness_figure(summary)]
    if role_spans(line):
        pictures.append(plots.timeline_figure(line))
    environment = Environment(loader=PackageLoader("gyre.report"), autoescape=True)
    environment.filters["visible"] = visible
    return environment.get_template("report.html").render(
        title=summary.run_id,
        facts=facts(summary),
        pictures=[_inline(plots.svg(picture).decode()) for picture in pictures],
        tables=[table for table in _tables(summary) if table.rows],
        config="\n".join(map(visible, config_text.splitlines())),
    )


def _tables(summary: RunSummary) -> list[Table]:
    total = len(summary.executions)
    title = "Executions" if total <= MAX_EXECUTIONS else f"Executions (last {MAX_EXECUTIONS} of {total})"
    return [
        steps_table(summary),
        transitions_table(summary),
        joins_table(summary),
        recovery_table(summary),
        executions_table(summary.executions[-MAX_EXECUTIONS:], title),
    ]


def _inline(svg: str) -> str:
    """Without what precedes the element; matplotlib has escaped the texts in it."""
    return svg[svg.index("<svg") :]
