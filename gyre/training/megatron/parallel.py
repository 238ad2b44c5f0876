"""The process groups inside one cell: tensor, pipeline and data parallel ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import Store

from gyre.training.config import ParallelConfig


def initialize(layout: ParallelConfig, rank: int, store: Store, timeout_s: float) -> None:
    """Joins the cell's ranks 0..ranks−1; all of them call this. `store` is private to the cell and this incarnation."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=layout.ranks, timeout=timedelta(seconds=timeout_s)
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        distributed_timeout_minutes=timeout_s / 60,
    )


def shutdown() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
