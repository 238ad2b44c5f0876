"""Root-mean-square norm, with weights around one or around zero."""

from typing import Any

import torch
from torch.nn.functional import rms_norm


class Norm(torch.nn.Module):
    """x / rms(x) · (offset + weight), computed in fp32. Megatron builds it by these keywords. The weight is left
    uninitialised."""

    def __init__(self, config: Any, hidden_size: int, eps: float, offset: float | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.offset = config.architecture.norm_offset if offset is None else offset
        self.weight = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float()
        scaled = rms_norm(x.float(), weight.shape, weight + self.offset if self.offset else weight, self.eps)
        return scaled.type_as(x)
