"""Lets SGLang start without a GPU. `scripts/sglang_cpu.sh` puts this folder on the path of that environment alone."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class _BeforeTorchvision(MetaPathFinder):
    """torchvision's wheel is built for CUDA, so its operators do not load here, but it describes two of them while it
    is imported: they are declared before that."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


class _AfterHostMemory(MetaPathFinder):
    """SGLang keeps the experts of tokens in host memory that it registers with CUDA: on a CPU plain memory does."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "sglang.srt.mem_cache.pool_host.common":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            import torch

            run(module)
            module.ALLOC_MEMORY_FUNCS["cpu"] = lambda sizes, dtype, device, *_, **__: torch.empty(
                sizes, dtype=dtype, device=device
            )

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _BeforeTorchvision())
sys.meta_path.insert(0, _AfterHostMemory())
