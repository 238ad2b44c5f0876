"""What megatron-core 0.16.1 needs in order to train without CUDA. With CUDA, `install` changes nothing.

Megatron asks torch for "the current CUDA device" wherever it allocates, so that one question is answered with the CPU.
A few of its modules write `device="cuda"` out in full; they see a view of `torch` that puts such tensors on the CPU.
Three functions are replaced: one asserts a CUDA type name; one adds up the gradient norm in fp32, which on a CPU is off
by 2e-4 at 5 million parameters and by 3e-3 at 50 million; one takes sizes from a device. Streams do nothing. Nothing is
patched per operator, so a forward or backward pass costs what it costs without this module (measured in
tests/platform/test_cpu.py).
"""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

_CPU = torch.device("cpu")
_HARD_CODED = (
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.utils",
)
"""Modules that allocate with a literal `device="cuda"` on the paths that Gyre uses."""

_installed = False


def install() -> None:
    """Makes megatron-core usable on this machine. Call it before the first megatron import; more calls do nothing."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _answer_cuda_questions()
    _import_megatron()
    for name in _HARD_CODED:
        importlib.import_module(name).__dict__["torch"] = _TorchOnCpu()
    counts = importlib.import_module("megatron.core.transformer.moe.token_dispatcher").__dict__
    counts["maybe_move_tensor_to_cpu"] = _counts
    importlib.import_module("megatron.core.transformer.moe.moe_utils").__dict__["te_general_gemm"] = None
    importlib.import_module("megatron.core.optimizer.optimizer").__dict__["clip_grad_by_total_norm_fp32"] = _clip
    importlib.import_module("megatron.core.optimizer.clip_grads").__dict__["l2_norm_impl"] = _l2_norm
    _installed = True


def _answer_cuda_questions() -> None:
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    # The dispatcher of sparse layers copies its counts to the host on a stream of its own.
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, return-value]


def _import_megatron() -> None:
    """Imports Megatron with other decorators. Small functions of it are decorated with `torch.compile`: on a CPU that
    means a C++ compiler, and loading the compiler itself costs every process more than a second. Its linear layers are
    decorated with what carries CUDA's autocast from forward to backward: on a CPU it must carry the CPU's."""
    before = torch.compile, torch.amp.custom_fwd, torch.amp.custom_bwd
    torch.compile = _not_compiled  # type: ignore[assignment]
    torch.amp.custom_fwd, torch.amp.custom_bwd = (_for_cpu(decorator) for decorator in before[1:])
    try:
        jit = importlib.import_module("megatron.core.jit")
    finally:
        torch.compile, torch.amp.custom_fwd, torch.amp.custom_bwd = before
    jit.disable_jit_fuser()


def _for_cpu(decorator: Any) -> Any:
    def decorate(function: Any = None, **_: Any) -> Any:
        return decorator(function, device_type="cpu")

    return decorate


def _not_compiled(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _not_compiled


@contextlib.contextmanager
def named_as_on_cuda() -> Iterator[None]:
    """While Megatron builds its optimizer, which asks tensors for names of CUDA types. Changes nothing with CUDA."""
    if not _installed:
        yield
        return
    original = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = named  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


class _Stream:
    """Everything runs in order."""

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def synchronize(self) -> None: ...


def _counts(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Megatron makes lists of a collective's sizes only on their way from a CUDA device."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _TorchOnCpu(ModuleType):
    """`torch`, except that factory functions called with `device="cuda"` allocate on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **_on_cpu(kwargs))

    def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **_on_cpu(kwargs))


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": _CPU} if kwargs.get("device") == "cuda" else kwargs


def _clip(parameters: list[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Megatron's `clip_grad_by_total_norm_fp32` without its assertion on the CUDA type name."""
    if use_decoupled_grad:
        raise ValueError("decoupled gradients belong to the precision-aware optimizer, which needs CUDA")
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient < 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], coefficient)


def _l2_norm(_chunk: int, _overflow: torch.Tensor, tensors: list[list[torch.Tensor]], *_: bool) -> Any:
    """Megatron's `local_multi_tensor_l2_norm`, accumulated in fp64: on the CPU torch adds up the squares of an fp32
    tensor one after the other."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for listed in tensors for tensor in listed]
    return torch.linalg.vector_norm(torch.stack(norms)).float(), None
