"""`gyre inspect RUN`: what a run did, or one execution call by call; reads files only, also while the run writes."""

import json
from pathlib import Path

from rich.console import Console

from gyre.cli.conversation_view import print_execution
from gyre.cli.tables import newest_executions, rich_facts, rich_table
from gyre.core.output import write_output
from gyre.report.facts import facts
from gyre.report.summary import RunSummary, as_json, summarise
from gyre.report.tables import joins_table, recovery_table, steps_table, transitions_table
from gyre.report.trees import tree_summary
from gyre.store import RunDir, RunStore


def inspect(run_dir: Path, *, execution: str | None = None, json_out: Path | None = None) -> int:
    """Prints the run's tables, or one execution; writes the JSON summary to `json_out`. Returns the exit code."""
    run = RunDir.open(run_dir)
    store = run.open_store(read_only=True)
    console = Console()
    if execution is not None:
        print_execution(console, run, store, execution)
    if json_out is not None or execution is None:
        summary = read_summary(store)
        if json_out is not None:
            write_output(json_out, json.dumps(as_json(summary), indent=1).encode() + b"\n", "--json")
        if execution is None:
            print_summary(console, summary)
    return 0


def read_summary(store: RunStore) -> RunSummary:
    trees = {execution_id: tree_summary(store.records(execution_id)) for execution_id in store.execution_ids()}
    return summarise(store.events(), store.outcomes(), trees)


def print_summary(console: Console, summary: RunSummary) -> None:
    for make in (steps_table, transitions_table, joins_table, recovery_table, newest_executions):
        table = make(summary)
        if table.rows:
            console.print(rich_table(table), "")
    console.print(rich_facts(facts(summary)))
