"""The live display of a run, fed with `ControlView` snapshots; one plain line per step when stdout is no terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre.cli.console import open_console
from gyre.control.state import ControlView

ROLE_STYLES = {"rollout": "blue", "training": "dark_orange"}
_BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40


class Progress:
    """Use as a context manager; call `update` whenever there is a newer view. It never waits and draws at most 4 × a
    second."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or open_console()
        self._rewards: list[float] = []
        self._step = -1
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """The terminal is as it was."""
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """Above what is displayed."""
        self._console.print(sentence, soft_wrap=True, highlight=False, markup=False)

    def update(self, view: ControlView) -> None:
        stepped = view.step > self._step and self._step >= 0
        if stepped and view.reward_mean is not None:
            self._rewards.append(view.reward_mean)
        if self._live is not None:
            self._live.update(render(view, self._rewards))
        elif view.step != self._step:
            self._console.print(plain_line(view), soft_wrap=True, highlight=False, markup=False)
        self._step = view.step


def plain_line(view: ControlView) -> str:
    reward = "–" if view.reward_mean is None else f"{view.reward_mean:.3f}"
    return (
        f"{clock(view.time)} step {view.step}/{view.max_steps} reward {reward} waterlevel {view.waterlevel} "
        f"running {view.running}/{view.capacity} grading {view.grading} ready {view.ready_groups} "
        f"cells {''.join(role[0].upper() for role in view.roles)}: {view.phase}"
    )


def render(view: ControlView, rewards: list[float]) -> RenderableType:
    """`rewards`: mean reward of every step that was seen, oldest first."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    grid.add_row("step", _bar(view.step, view.max_steps, f"{view.step}/{view.max_steps}  {clock(view.time)}"))
    batch = f"{view.batch_groups_done}/{view.batch_groups} groups trained, {view.batch_groups_taken} taken"
    grid.add_row("batch", _bar(view.batch_groups_done, view.batch_groups, batch))
    grid.add_row(
        "executions",
        f"{view.running} running of {view.capacity}, {view.queued} queued, {view.grading} in grading, "
        f"{view.closed} closed; "
        f"ready groups {view.ready_groups}, waterlevel {view.waterlevel}",
    )
    grid.add_row("cells", _cells(view))
    if rewards:
        grid.add_row("reward", Text(f"{sparkline(rewards)}  {rewards[-1]:.3f}"))
    grid.add_row("now", Text(view.phase))
    return Group(grid)


def sparkline(values: list[float]) -> str:
    """The last values as bars between 0 and 1; rewards outside are drawn at the edge."""
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, max(0, round(value * top)))] for value in values[-SPARKLINE_WIDTH:])


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _bar(done: int, total: int, text: str) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=max(1, total), completed=done, width=30), text)
    return row


def _cells(view: ControlView) -> Text:
    line = Text()
    for cell, role in enumerate(view.roles):
        line.append(f" {cell} {role} ", style=f"white on {ROLE_STYLES[role]}")
        line.append(" ")
    return line.append(f"{view.training_cells} in the batch", style="dim") if view.training_cells else line
