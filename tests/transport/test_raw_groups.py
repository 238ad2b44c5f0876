"""How a group for CUDA tensors is made. What groups do is tested where they are used."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from gyre.transport.groups import make_group


def test_groups_of_cuda_tensors_are_nccl_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is not here: this shows how its group is made and no more."""
    made = []

    class Nccl:
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace()

        def __init__(self, store: object, rank: int, size: int, options: "Nccl.Options") -> None:
            waits = os.environ["TORCH_NCCL_BLOCKING_WAIT"]
            made.append((rank, size, waits, options.config.blocking, options._timeout))

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800")
    store = c10d.HashStore()
    assert isinstance(make_group(store, 1, 3, torch.device("cuda"), "127.0.0.1", timeout_s=2.5), Nccl)
    assert made == [(1, 3, "1", 0, timedelta(seconds=2.5))]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "3"
