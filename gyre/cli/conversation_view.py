"""One execution call by call: where each call attaches to the tree, its tokens, their text where it can be decoded."""

from rich.console import Console
from rich.text import Text

from gyre.cli.tables import rich_table
from gyre.core.errors import ConfigError
from gyre.report.tables import assessment_sentence, calls_table, outcome_sentence
from gyre.report.text import decoder, excerpt, visible
from gyre.store import RunDir, RunStore


def print_execution(console: Console, run: RunDir, store: RunStore, execution_id: str) -> None:
    """Raises ConfigError when the run has no such execution."""
    records, outcome = store.records(execution_id), store.outcome(execution_id)
    if not records and outcome is None:
        known = store.execution_ids()
        raise ConfigError(
            f"{run.root} has no execution {execution_id!r}"
            + (f"; it has {len(known)}, from {known[0]} to {known[-1]}." if known else ": none has made a call yet.")
        )
    decode = decoder(run)
    console.print(rich_table(calls_table(records, {record.call_id: record.seq for record in records})), "")
    for record in records:
        console.rule(f"call {record.seq}  {record.role.value}", align="left", style="dim")
        console.print(Text("in   ", style="dim"), Text(excerpt(record.delta_ids, decode), style="blue"), sep="")
        console.print(Text("out  ", style="dim"), Text(excerpt(record.output_ids, decode), style="green"), sep="")
    if outcome is not None:
        console.rule(style="dim")
        console.print(visible(outcome_sentence(outcome)), markup=False)
    for assessment in store.assessments(execution_id):
        console.print(visible(assessment_sentence(assessment)), markup=False)
