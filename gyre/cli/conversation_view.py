"""One execution call by call: where each call attaches to the tree, its tokens, their text where it can be decoded."""

from typing import Any

from rich.console import Console
from rich.text import Text

from gyre.cli.tables import rich_table
from gyre.core.errors import ConfigError
from gyre.core.records import CallRecord, Outcome
from gyre.report.tables import assessment_sentence, calls_table, outcome_sentence
from gyre.report.text import Decode, decoder, excerpt, visible
from gyre.store import RunDir, RunStore


def read_execution(run: RunDir, store: RunStore, execution_id: str) -> tuple[list[CallRecord], Outcome | None]:
    """Raises ConfigError when the run has no such execution."""
    records, outcome = store.records(execution_id), store.outcome(execution_id)
    if not records and outcome is None:
        known = store.execution_ids()
        raise ConfigError(
            f"{run.root} has no execution {execution_id!r}"
            + (f"; it has {len(known)}, from {known[0]} to {known[-1]}." if known else ": none has made a call yet.")
        )
    return records, outcome


def call_json(record: CallRecord, decode: Decode | None) -> dict[str, Any]:
    """The record as it is stored, and its text where it can be decoded."""
    texts = {"input_text": record.delta_ids, "output_text": record.output_ids} if decode else {}
    return {field: getattr(record, field) for field in record.__struct_fields__ if field != "routing"} | {
        name: decode(ids) for name, ids in texts.items() if decode
    }


def print_execution(console: Console, run: RunDir, store: RunStore, execution_id: str) -> None:
    """Raises ConfigError when the run has no such execution."""
    records, outcome = read_execution(run, store, execution_id)
    decode = decoder(run)
    console.print(rich_table(calls_table(records, {record.call_id: record.seq for record in records})), "")
    for record in records:
        console.print(Text(f"── call {record.seq}  {record.role.value}", style="dim"))
        console.print(Text("in   ", style="dim"), Text(excerpt(record.delta_ids, decode), style="blue"), sep="")
        console.print(Text("out  ", style="dim"), Text(excerpt(record.output_ids, decode), style="green"), sep="")
    if outcome is not None:
        console.print()
        console.print(visible(outcome_sentence(outcome)), markup=False)
    for assessment in store.assessments(execution_id):
        console.print(visible(assessment_sentence(assessment)), markup=False)
