"""What every layer of a pipeline stage needs to know of a pack besides the hidden states; made once a pack."""

from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state

from gyre.training.megatron.forward_batch import ForwardBatch
from gyre.training.megatron.layers.attend import Attend, attention_over
from gyre.training.megatron.layers.context import Context


class LayerInputs:
    """Travels through Megatron's layers in the place of its description of a packed sequence."""

    qkv_format = "sbhd"

    def __init__(self, pack: ForwardBatch, cosine_sine: Any) -> None:
        self.nodes = pack.nodes
        self.context = Context(pack.nodes, parallel_state.get_tensor_model_parallel_world_size(), pack.ids_T.device)
        self._positions_T = pack.positions_T
        self._choices_TL = pack.choices_TL
        self._cos, self._sin = cosine_sine(pack.positions_T[self.context.index_C])
        self.attend = cache(self._attend)
        """Window → what attends, made at its first use."""

    def _attend(self, window: int | None) -> Attend:
        index = None if self.context.size == 1 else self.context.index_C
        return attention_over(self.nodes, self.context.queries, self._positions_T, window, index)

    def rotate(self, x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        """Turns the first dimensions of [C, heads, dim] by the positions of this rank's tokens."""
        width = 2 * self._cos.shape[-1]
        turned, rest = x[..., :width].float(), x[..., width:]
        one, two = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        cos, sin = self._cos[:, None], self._sin[:, None]
        return torch.cat([(one * cos - two * sin).type_as(x), (two * cos + one * sin).type_as(x), rest], dim=-1)

    def choices(self, slot: int) -> torch.Tensor | None:
        """Experts to replay in the layer that is number `slot` of those with experts, for the tokens that this
        sequence-parallel rank routes, [tokens, k]."""
        if self._choices_TL is None:
            return None
        size = parallel_state.get_tensor_model_parallel_world_size()
        mine = self.context.index_C.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return self._choices_TL[mine, slot].long()
