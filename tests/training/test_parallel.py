"""Setting up the process groups of a cell."""

import pytest
import torch
import torch.distributed as dist

from gyre.core.errors import ConfigError
from gyre.training.config import ParallelConfig
from gyre.training.megatron import parallel


def test_a_gpu_that_torch_does_not_see_is_no_reason_to_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"this rank has GPU 3, and torch .* sees none"):
        parallel.initialize(ParallelConfig(), 0, "cell", dist.HashStore())
