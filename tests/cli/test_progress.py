"""The live display: what it shows on a terminal, and one plain line per step elsewhere."""

import io

import msgspec
import pytest
from rich.console import Console

from gyre.cli.progress import Progress, clock, plain_line, sparkline
from gyre.control.state import ControlView
from gyre.report.plots import moving_mean

VIEW = ControlView(
    time=372.4,
    step=5,
    max_steps=24,
    version=5,
    published=4,
    phase="waiting for [2] ready groups",
    queued=6,
    running=12,
    closed=70,
    waterlevel=18,
    capacity=16,
    ready_groups=1,
    roles=["training", "rollout"],
    training_cells=1,
    batch_groups_taken=2,
    batch_groups_done=1,
    batch_groups=4,
    reward_mean=0.43,
)


def test_one_plain_line_per_step_without_a_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=20)) as progress:
        for step in (0, 0, 1, 1, 1, 2):
            progress.update(msgspec.structs.replace(VIEW, step=step))
    lines = out.getvalue().splitlines()
    assert [line.split(" reward")[0] for line in lines] == ["06:12 step 0/24", "06:12 step 1/24", "06:12 step 2/24"]
    assert lines[0].endswith("cells TR: waiting for [2] ready groups"), "nothing is taken for markup or wrapped"


def test_the_terminal_shows_everything_of_a_view() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, color_system=None, width=120)) as progress:
        for step, reward in enumerate((None, 0.0, 1.0, 0.43)):
            progress.update(msgspec.structs.replace(VIEW, step=step, reward_mean=reward))
    last = out.getvalue()
    for shown in (
        "3/24",
        "06:12",
        "1/4 groups trained",
        "12 running of 16",
        "waterlevel 18",
        "0 training",
        "1 rollout",
    ):
        assert shown in last
    assert "▁█▄  0.430" in last
    assert "waiting for [2] ready groups" in last


@pytest.mark.parametrize(("seconds", "text"), [(0, "00:00"), (61.9, "01:01"), (3600, "1:00:00"), (36125, "10:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_sparkline_is_bounded() -> None:
    assert sparkline([0.0, 0.5, 1.0, -3.0, 7.0]) == "▁▅█▁█"
    assert len(sparkline([0.5] * 100)) == 40


def test_a_view_without_reward_has_a_plain_line() -> None:
    assert "reward –" in plain_line(msgspec.structs.replace(VIEW, reward_mean=None))


def test_moving_mean_is_narrower_at_the_ends() -> None:
    assert moving_mean([0.0, 3.0, 6.0, 9.0], 1) == [1.5, 3.0, 6.0, 7.5]
