"""The CPU platform module: inert with CUDA, idempotent, nothing patched per operator."""

import importlib

import pytest
import torch
from torch.overrides import _len_torch_function_stack

from gyre.platform import cpu

PATCHED = [("torch.cuda", "current_device"), ("torch.cuda", "synchronize")]
PATCHED += [(name, "torch") for name in cpu._HARD_CODED]
PATCHED += [
    ("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.clip_grads", "l2_norm_impl"),
    ("megatron.core.jit", "jit_fuser"),
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    cpu.install()


def test_changes_nothing_when_cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = object()
    for module, name in PATCHED:
        monkeypatch.setattr(importlib.import_module(module), name, untouched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_installed", False)
    cpu.install()
    assert not cpu._installed
    assert all(getattr(importlib.import_module(module), name) is untouched for module, name in PATCHED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA: nothing is installed")
class TestWithoutCuda:
    def test_a_second_call_does_nothing(self) -> None:
        before = [getattr(importlib.import_module(module), name) for module, name in PATCHED]
        cpu.install()
        after = [getattr(importlib.import_module(module), name) for module, name in PATCHED]
        assert all(a is b for a, b in zip(before, after, strict=True))

    def test_operators_are_not_intercepted(self) -> None:
        assert _len_torch_function_stack() == 0
        assert torch.zeros(1).type() == "torch.FloatTensor"

    def test_megatron_allocates_on_the_cpu(self) -> None:
        optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
        assert optimizer.torch.tensor([1.0], device="cuda").device.type == "cpu"
        assert optimizer.torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.cuda.current_device() == torch.device("cpu")

    def test_torch_itself_still_refuses_cuda(self) -> None:
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")

    def test_the_gradient_norm_is_exact_for_large_parameters(self) -> None:
        """torch.norm is off by 2e-4 here."""
        clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(size, generator=generator) for size in (5_000_000, 1000, 1)]
        whole = float(torch.cat(gradients).double().norm())
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, torch.zeros(1), [gradients], False)
        assert float(norm) == pytest.approx(whole, rel=3e-7)

    @pytest.mark.parametrize("scale", [0.1, 10.0])
    def test_clip_equals_torch(self, scale: float) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
        for i, parameter in enumerate(parameters):
            parameter.grad = scale * torch.arange(1.0 + i, 1.0 + i + len(parameter))
        reference = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters]
        for theirs, ours in zip(reference, parameters, strict=True):
            theirs.grad = ours.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(reference, 1.0)
        cpu._clip(parameters, 1.0, float(norm))
        for ours, theirs in zip(parameters, reference, strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6)
        with pytest.raises(ValueError, match="CUDA"):
            cpu._clip(parameters, 1.0, 2.0, use_decoupled_grad=True)
