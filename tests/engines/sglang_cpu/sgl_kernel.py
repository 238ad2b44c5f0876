"""Stands in for SGLang's kernel library, which has no wheel for a CPU without AMX. Only for CPU tests.

SGLang imports many names from it and, on the path of `--attention-backend torch_native`, calls none: every name exists
here and raises when it is called.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []


class Missing:
    """A kernel, or a namespace of kernels."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        return _missing(self._name, name)

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{self._name} was called, but this environment has no SGLang kernels")


def _missing(parent: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{parent}.{name}")


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> Missing:
        return _missing(self.__name__, name)


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


sys.meta_path.insert(0, _Submodules())


def __getattr__(name: str) -> Any:
    return _missing(__name__, name)
