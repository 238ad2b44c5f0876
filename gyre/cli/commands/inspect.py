"""`gyre inspect RUN`: what a run did, or one execution call by call; reads files only, also while the run writes."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from gyre.cli.console import open_console
from gyre.cli.conversation_view import call_json, print_execution, read_execution
from gyre.cli.tables import newest_executions, rich_facts, rich_table
from gyre.core.system.output import STANDARD_OUTPUT, write_output
from gyre.report.facts import facts
from gyre.report.summary import RunSummary, as_json, summarise
from gyre.report.tables import joins_table, recovery_table, steps_table, transitions_table
from gyre.report.text import decoder
from gyre.report.trees import tree_summary
from gyre.store import RunDir, RunStore


def inspect(run_dir: Path, *, execution: str | None = None, json_out: Path | None = None) -> int:
    """Prints the run's tables, or one execution; writes the JSON summary to `json_out`. Returns the exit code."""
    run = RunDir.open(run_dir)
    store = run.open_store(read_only=True)
    if json_out is not None:
        document = _execution_json(run, store, execution) if execution else _summary_json(read_summary(store))
        write_output(json_out, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n", "--json")
    if json_out == STANDARD_OUTPUT:
        return 0
    console = open_console()
    if execution is not None:
        print_execution(console, run, store, execution)
    else:
        print_summary(console, read_summary(store))
    return 0


def _summary_json(summary: RunSummary) -> dict[str, Any]:
    return as_json(summary) | {"facts": {fact.name: fact.text for fact in facts(summary)}}


def _execution_json(run: RunDir, store: RunStore, execution_id: str) -> dict[str, Any]:
    """All that is known of one execution. Raises ConfigError when the run has no such execution."""
    records, outcome = read_execution(run, store, execution_id)
    decode = decoder(run)
    return {
        "execution": execution_id,
        "calls": [call_json(record, decode) for record in records],
        "outcome": outcome,
        "assessments": store.assessments(execution_id),
    }


def read_summary(store: RunStore) -> RunSummary:
    trees = {execution_id: tree_summary(store.records(execution_id)) for execution_id in store.execution_ids()}
    return summarise(store.events(), store.outcomes(), trees)


def print_summary(console: Console, summary: RunSummary) -> None:
    for make in (steps_table, transitions_table, joins_table, recovery_table, newest_executions):
        table = make(summary)
        if table.rows:
            console.print(rich_table(table), "")
    console.print(rich_facts(facts(summary)))
