"""Megatron's own 1F1B schedule over packs of different lengths: what the streaming one is compared with, in
`streaming_pipeline.py` and in tests/training."""

from typing import Any

import torch

from gyre.training.megatron.forward_batch import ForwardBatch
from gyre.training.megatron.replica import Replica


def stock(replica: Replica, packs: list[ForwardBatch]) -> None:
    """Forward and backward of the sum of all outputs; the gradients of `replica` grow by it."""
    # After gyre.training.megatron, which makes megatron importable without CUDA.
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = replica.model.config
    config.variable_seq_lengths, config.deallocate_pipeline_outputs, config.batch_p2p_comm = True, False, False

    def step(iterator: Any, model: Any) -> Any:
        # Three values: Megatron then leaves the sum as it is.
        return model(next(iterator)), lambda output: (output.sum(), torch.tensor(1), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(packs),
        model=[replica.ddp],
        num_microbatches=len(packs),
        seq_length=max(replica.travelling(pack) for pack in packs),
        micro_batch_size=1,
    )
