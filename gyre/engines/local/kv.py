"""The paged KV memory, written but not gathered: `attention` reads it where it lies.

The library gathers keys and values of the whole pass into new tensors in every layer. These are megabytes, which malloc
maps and unmaps each time and which no CPU cache holds; that costs more than the attention itself.
"""

import torch
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator


class InPlaceAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        read_index: torch.Tensor,
        write_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values [T_q, kv_heads, d]. Returns them when the pass reads nothing else, otherwise the
        layer's whole memory, [slots, kv_heads, d], to be read at `read_index`."""
        keys, values = self._kv_token_views[layer_idx]
        keys.index_copy_(0, write_index, key_states)
        values.index_copy_(0, write_index, value_states)
        return (key_states, value_states) if read_index.numel() == 0 else (keys, values)
