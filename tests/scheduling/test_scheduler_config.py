import msgspec
import pytest

from gyre.core.errors import ConfigError
from gyre.scheduling.config import SchedulerConfig, capacity, problems, require

GOOD = {"B": 4, "N": 2, "K": 2, "C_e": 4, "max_steps": 6}


def config(**changes) -> SchedulerConfig:
    return SchedulerConfig(**(GOOD | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"phi": 0.5, "mu": 3},
        {"policy": "async", "K": 1, "C_e": 0, "C_s": 4, "phi": 1.5},
        {"policy": "colocate", "K": 1},
        {"policy": "coarse", "K": 1, "C_s": 2, "phi": 0.25},
        {"policy": "async", "C_s": 8, "dispatch": "continuous"},
        {"dispatch": "continuous", "C_e": 8},
    ],
)
def test_possible_configurations_are_accepted(changes):
    assert problems(config(**changes)) == []
    assert require(config(**changes)).B == 4


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"B": 0}, "scheduler.B", "≥ 1"),
        ({"mu": 0}, "scheduler.mu", "≥ 1"),
        ({"phi": -0.5}, "scheduler.phi", "≥ 0"),
        ({"rho_min": 0.0}, "scheduler.rho_min", "outside (0, 1]"),
        ({"rho_min": 1.5}, "scheduler.rho_min", "outside (0, 1]"),
        ({"phi": 0.3}, "scheduler.phi", "whole number"),
        ({"phi": 1e308}, "scheduler.phi", "whole number"),
        ({"C_s": 2, "pool_engines": 3}, "scheduler.pool_engines", "at least one execution"),
        ({"policy": "colocate"}, "scheduler.K", "must be 1"),
        ({"policy": "colocate", "K": 1, "phi": 1.0}, "scheduler.phi", "φ must be 0"),
        ({"policy": "colocate", "K": 1, "C_s": 4}, "scheduler.C_s", "use policy coarse"),
        ({"policy": "coarse", "K": 1}, "scheduler.C_s", "at least one"),
        ({"policy": "async"}, "scheduler.C_s", "at least one"),
        ({"C_e": 0}, "scheduler.C_e", "≥ 1"),
        ({"N": 9}, "scheduler.N", "one group must fit"),
        ({"policy": "async", "K": 8, "C_s": 1}, "scheduler.N", "C_s = 1"),
        ({"policy": "colocate", "K": 1, "C_e": 8, "dispatch": "continuous"}, "scheduler.dispatch", "might never train"),
        ({"dispatch": "continuous"}, "scheduler.dispatch", "might never train"),
    ],
)
def test_an_impossible_configuration_is_one_sentence_with_key_and_reason(changes, key, reason):
    with pytest.raises(ConfigError) as caught:
        require(config(**changes))
    sentence = str(caught.value)
    assert sentence.startswith(f"{key} ")
    assert reason in sentence
    assert sentence.endswith(".")


def test_unknown_keys_and_types_are_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field `C_x`"):
        msgspec.convert(GOOD | {"C_x": 1}, SchedulerConfig)
    with pytest.raises(msgspec.ValidationError, match=r"\$.policy"):
        msgspec.convert(GOOD | {"policy": "greedy"}, SchedulerConfig)


def test_derived_numbers():
    chosen = config(phi=0.5, mu=3, C_s=3, pool_engines=2)
    assert chosen.depth == 14
    assert chosen.pool == [-1, -2]
    assert config().pool == []
    assert [capacity(chosen, k) for k in range(3)] == [11, 7, 3]
