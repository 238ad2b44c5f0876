"""Gyre: online reinforcement learning of LLM agents through unmodified black-box harnesses.

The Python API is `gyre.api`; its names are also here, and are imported when they are first used, so that a worker or
`gyre doctor` does not load what it does not need.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gyre.api import (
        Run,
        Training,
        check,
        load_config,
        load_trees,
        plan,
        prepare,
        prepare_resumption,
        resume,
        simulate,
        train,
    )

__all__ = [
    "Run",
    "Training",
    "check",
    "load_config",
    "load_trees",
    "plan",
    "prepare",
    "prepare_resumption",
    "resume",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gyre' has no attribute {name!r}")
    from gyre import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
