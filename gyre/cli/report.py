"""What `gyre train` leaves at its end: a table on the terminal and two pictures in the run directory."""

from pathlib import Path

from rich.console import Console

from gyre.cli import plots, tables
from gyre.cli.inspect import read_summary
from gyre.store import RunDir


def final_report(run_dir: Path, console: Console | None = None) -> None:
    """Reads the run directory only, so it can be repeated at any time; overwrites `reward.png` and `timeline.png`."""
    run = RunDir.open(run_dir)
    store = run.open_store(read_only=True)
    summary = read_summary(store)
    console = console or Console()
    console.print()
    if summary.steps:
        console.print(tables.steps_table(summary), "")
        plots.draw_reward(summary, run.root / "reward.png")
    plots.draw_timeline(list(store.events()), run.root / "timeline.png")
    console.print(tables.facts(summary))
    console.print(f"\nPictures: {run.root}/reward.png, {run.root}/timeline.png", soft_wrap=True, highlight=False)
    console.print(f"More:     gyre inspect {run.root}", soft_wrap=True, highlight=False)
