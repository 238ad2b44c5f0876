"""What `gyre train` leaves at its end: a table on the terminal and two pictures in the run directory."""

from pathlib import Path

from rich.console import Console

from gyre.cli import plots, tables
from gyre.cli.inspect import read_summary
from gyre.store import RunDir
from gyre.store.journal import on_one_axis
from gyre.store.timeline import role_spans


def final_report(run_dir: Path, console: Console | None = None) -> None:
    """Reads the run directory only, so it can be repeated at any time; overwrites `reward.png` and `timeline.png`,
    each drawn once the journal has something to draw."""
    run = RunDir.open(run_dir)
    store = run.open_store(read_only=True)
    summary, events = read_summary(store), on_one_axis(store.events())
    console = console or Console()
    console.print()
    pictures = []
    if summary.steps:
        console.print(tables.steps_table(summary), "")
        pictures.append(run.root / "reward.png")
        plots.draw_reward(summary, pictures[-1])
    if summary.recovery:
        console.print(tables.recovery_table(summary), "")
    if role_spans(events):
        pictures.append(run.root / "timeline.png")
        plots.draw_timeline(events, pictures[-1])
    console.print(tables.facts(summary), "")
    for picture in pictures:
        console.print(f"Picture: {picture}", soft_wrap=True, highlight=False)
    console.print(f"More:    gyre inspect {run.root}", soft_wrap=True, highlight=False)
