"""What `gyre train` leaves at its end: a table on the terminal and two pictures in the run directory."""

from pathlib import Path

from rich.console import Console

from gyre.cli.commands.inspect import read_summary
from gyre.cli.console import open_console
from gyre.cli.tables import rich_facts, rich_table
from gyre.report import plots
from gyre.report.facts import facts
from gyre.report.tables import recovery_table, steps_table
from gyre.report.timeline import role_spans
from gyre.store import RunDir
from gyre.store.journal import on_one_axis


def final_report(run_dir: Path, console: Console | None = None) -> None:
    """Reads the run directory only, so it can be repeated at any time; overwrites `reward.png` and `timeline.png`,
    each drawn once the journal has something to draw."""
    run = RunDir.open(run_dir)
    store = run.open_store(read_only=True)
    summary, events = read_summary(store), on_one_axis(store.events())
    console = console or open_console()
    console.print()
    pictures = []
    if summary.steps:
        console.print(rich_table(steps_table(summary)), "")
        pictures.append(run.root / "reward.png")
        plots.save(plots.reward_figure(summary), pictures[-1])
    if summary.recovery:
        console.print(rich_table(recovery_table(summary)), "")
    if role_spans(events):
        pictures.append(run.root / "timeline.png")
        plots.save(plots.timeline_figure(events), pictures[-1])
    console.print(rich_facts(facts(summary)), "")
    for picture in pictures:
        console.print(f"Picture: {picture}", soft_wrap=True, highlight=False)
    console.print(f"More:    gyre inspect {run.root}", soft_wrap=True, highlight=False)
