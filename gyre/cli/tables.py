"""Tables and facts of a run on the terminal."""

from collections.abc import Sequence

from rich.table import Table as RichTable
from rich.text import Text

from gyre.report.facts import Fact
from gyre.report.summary import RunSummary
from gyre.report.tables import Table, executions_table
from gyre.report.text import visible

MAX_EXECUTIONS = 60
TONES = {"": "", "good": "green", "bad": "red"}


def rich_table(table: Table) -> RichTable:
    """What a cell holds is text, never markup."""
    rich = RichTable(
        title=Text(table.title), title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    rich.min_width = len(table.title)
    for column in table.columns:
        rich.add_column(column.name, justify="left" if column.left else "right")
    for index, row in enumerate(table.rows):
        rich.add_row(*(Text(visible(cell)) for cell in row), style="red" if index in table.bad else None)
    return rich


def newest_executions(summary: RunSummary) -> Table:
    """The newest `MAX_EXECUTIONS`; `--json` has all."""
    total = len(summary.executions)
    some = total > MAX_EXECUTIONS
    title = f"Executions (last {MAX_EXECUTIONS} of {total}; --json has all)" if some else "Executions"
    return executions_table(summary.executions[-MAX_EXECUTIONS:], title)


def rich_facts(facts: Sequence[Fact]) -> RichTable:
    table = RichTable.grid(padding=(0, 2))
    for fact in facts:
        table.add_row(fact.name, Text(visible(fact.text), style=TONES[fact.tone]))
    return table
