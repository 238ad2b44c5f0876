"""Several projections of the same tokens as one product, each with the name and layout that it has in a file.

Megatron's own layer for queries, keys and values holds them in one interleaved matrix, and with more tensor-parallel
ranks than key-value heads it computes and gathers all of them on every rank. Here each rank has the rows of its heads,
and a key-value head that several ranks need is a copy on each.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce


class Matrix(torch.nn.Module):
    """A weight [rows, inputs], and a bias [rows], uninitialised."""

    def __init__(self, config: Any, rows: int, inputs: int, bias: bool = False) -> None:
        super().__init__()
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(rows, inputs, **like))
        self.bias = torch.nn.Parameter(torch.empty(rows, **like)) if bias else None


class Columns(torch.nn.ModuleDict):
    """name → Matrix with this rank's rows. Input [T/tp, 1, inputs] with sequence parallelism, output per name
    [T, 1, rows]."""

    def __init__(self, config: Any, inputs: int, rows: Mapping[str, int], bias: bool = False) -> None:
        super().__init__({name: Matrix(config, count, inputs, bias) for name, count in rows.items()})
        self._rows = list(rows.values())
        self._sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        matrices: list[Any] = list(self.values())
        weight = torch.cat([matrix.weight for matrix in matrices])
        out = linear_with_grad_accumulation_and_async_allreduce(
            hidden,
            weight,
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=not self._sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1,
            sequence_parallel=self._sequence_parallel,
        )
        if matrices[0].bias is not None:
            out = out + torch.cat([matrix.bias for matrix in matrices])
        return torch.split(out, self._rows, dim=-1)


def shared_out(what: str, count: int) -> int:
    """How many of `count` heads a tensor-parallel rank has. Raises ValueError unless they can be shared out evenly."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if count % size:
        raise ValueError(f"{count} {what} cannot be shared out to {size} tensor-parallel ranks")
    return int(count // size)


def copies_of(groups: int) -> int:
    """On how many tensor-parallel ranks each key-value head is."""
    return max(1, int(parallel_state.get_tensor_model_parallel_world_size()) // groups)
