"""KV of a token prefix, out of one engine's paged memory and into another one's. *Paused* on both sides.

Only whole blocks travel, and they arrive as cached blocks that no request holds: the next request with this prefix
finds them like any other, and memory pressure evicts them like any other. Where the engine keeps the experts that
computed a block, they travel behind its KV.
"""

from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

from gyre.engines.local.expert_routing import ExpertRoutingMemory


def layout(allocator: Any, routing: ExpertRoutingMemory | None) -> str:
    """Two engines can exchange blocks when these are equal."""
    kv = f"{allocator.tokens_per_page} tokens, {allocator.bytes_per_block} bytes, {allocator.cache_dtype}"
    return kv if routing is None else f"{kv}, {routing.bytes_per_block} bytes of experts"


def take(allocator: Any, routing: ExpertRoutingMemory | None, input_ids: list[int]) -> torch.Tensor:
    """Blocks of the longest prefix of `input_ids` that is in memory, copied: bytes [blocks, bytes of a block]."""
    # The search leaves out the last token, whose logits a request needs: any one token more makes it search all.
    blocks = allocator.match_prefix_blocks([*input_ids, 0])
    copied: torch.Tensor = allocator._copy_view[torch.tensor(blocks, dtype=torch.long)].view(torch.uint8)
    return copied if routing is None else torch.cat((copied, routing.blocks(blocks)), dim=1)


def put(
    allocator: Any, routing: ExpertRoutingMemory | None, input_ids: list[int], blocks: torch.Tensor
) -> tuple[int, int]:
    """Stores blocks of the prefix of `input_ids` that are not here yet, as far as memory is free; evicts nothing.
    Returns how many blocks of the prefix are in memory then, and how many of them came now."""
    pool, ledger, size = allocator.pool, allocator.ledger, allocator.tokens_per_page
    stored = 0
    parent: int | None = None
    for i, block in enumerate(blocks):
        parent = compute_block_hash(parent, input_ids[i * size : (i + 1) * size])
        if parent in ledger.hash_to_block:
            continue
        if pool.count_free_blocks(allocator.index) == 0:
            if pool.num_free_sectors == 0:
                return i, stored
            pool.allocate_sector(allocator.index)
        (place,) = pool.get_free_blocks(allocator.index, 1)
        kv = block[: allocator.bytes_per_block]
        allocator._copy_view[place] = kv.view(allocator._copy_view.dtype)
        if routing is not None:
            routing.put(place, block[allocator.bytes_per_block :])
        ledger.register_new_hash(place, parent)
        ledger.cached_blocks[place] = None
        stored += 1
    return len(blocks), stored
