from gyre.control.live.fleet.progress import Liveness
from gyre.engines.base import EngineStatus


def status(running: int, tokens: int, paused: bool = False) -> EngineStatus:
    return EngineStatus(
        version=0,
        running=running,
        paused=paused,
        released=False,
        generated_tokens=tokens,
        cached_tokens=0,
        weights_checksum="",
    )


def test_an_engine_with_requests_must_produce_tokens() -> None:
    liveness = Liveness(0.0, most_s=100.0)
    assert liveness.observe(5.0, status(2, 10)) == 0.0
    assert liveness.observe(9.0, status(2, 10)) == 4.0, "it answers, but makes no progress"
    assert liveness.observe(12.0, status(1, 11)) == 0.0


def test_an_idle_or_paused_engine_needs_no_progress() -> None:
    liveness = Liveness(0.0, most_s=100.0)
    assert liveness.observe(50.0, status(0, 0)) == 0.0
    assert liveness.observe(90.0, status(3, 0, paused=True)) == 0.0


def test_no_answer_is_no_progress() -> None:
    liveness = Liveness(10.0, most_s=100.0)
    assert liveness.observe(14.0, None) == 4.0
    assert liveness.observe(15.0, status(0, 0)) == 0.0


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The controller was stopped for an hour, and the first answer after it came too late."""
    liveness = Liveness(0.0, most_s=6.0)
    assert liveness.observe(4.0, status(2, 10)) == 0.0
    assert liveness.observe(3604.0, None) == 6.0
    assert liveness.observe(3608.0, None) == 10.0
    assert liveness.observe(3609.0, status(2, 11)) == 0.0
