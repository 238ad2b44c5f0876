"""Which experts computed each token's KV, kept beside the paged KV memory and read back by position.

A block of KV that is shared, cached, evicted or moved keeps the choices that made it, so a prompt that the prefix cache
serves has a record as well. Works on the generation thread, or while it is *paused*.
"""

from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from gyre.core.errors import ConfigError, InvariantViolation
from gyre.core.expert_routing import ExpertRouting, id_type


class ExpertRoutingMemory:
    """One entry per slot of the KV memory: [blocks, page, L, k]. Raises ConfigError for a model whose routers are not
    known."""

    def __init__(self, model: Any, allocator: Any) -> None:
        routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
        if not routers:
            raise ConfigError(
                f"the local engine knows no routers of a {model.config.model_type} model and cannot tell its experts; "
                "set trainer.replay_routing = false"
            )
        self._allocator = allocator
        self._empty = ExpertRouting(len(routers), routers[0].top_k, routers[0].num_experts, b"")
        kind = np.dtype(id_type(self._empty.experts, self._empty.chosen))
        page, shape = allocator.tokens_per_page, (len(routers), self._empty.chosen)
        self._memory = np.full((len(allocator._copy_view), page, *shape), np.iinfo(kind).max, kind)
        self._pass: list[torch.Tensor] = []
        self._told: dict[str, int] = {}
        """Positions of each request that were read already, or are not wanted."""
        self._read: dict[str, ExpertRouting] = {}
        """Read and not taken."""
        for router in routers:
            router.register_forward_hook(self._note)

    @property
    def bytes_per_block(self) -> int:
        return int(self._memory[0].nbytes)

    def begin(self, request_id: str, position: int) -> None:
        self._told[request_id] = position

    def forget(self, request_id: str) -> None:
        self._told.pop(request_id, None)
        self._read.pop(request_id, None)

    def after_pass(self, inputs: Any) -> None:
        """Stores what the pass chose and reads what its requests have to tell. `inputs` are the library's
        `ContinuousBatchingIOs` of the pass."""
        chosen = torch.stack(self._pass, dim=1).numpy()
        self._pass = []
        slots = inputs.write_index_storage[0, : inputs.true_write_sizes[0]].numpy()
        blocks, offsets = np.divmod(slots, self._allocator.block_physical_stride)
        if len(slots) != len(chosen):
            raise InvariantViolation(f"a pass wrote KV of {len(slots)} tokens and chose experts for {len(chosen)}")
        self._memory[blocks, offsets] = chosen
        for entry in inputs.requests_in_batch:
            key, end = entry.state.request_id, entry.state.position_offset
            start = self._told.get(key, end)
            if entry.has_new_token and start < end:
                table = np.array(self._allocator.block_table[key])
                block, offset = np.divmod(np.arange(start, end), self._allocator.tokens_per_page)
                self._read[key] = self._empty.replaced(self._memory[table[block], offset])
                self._told[key] = end

    def take(self, request_id: str) -> ExpertRouting | None:
        """What the last pass had to tell."""
        return self._read.pop(request_id, None)

    def blocks(self, places: list[int]) -> torch.Tensor:
        """Copied: bytes [blocks, bytes of a block]."""
        return torch.from_numpy(self._memory[places].view(np.uint8).reshape(len(places), self.bytes_per_block))

    def put(self, place: int, block: torch.Tensor) -> None:
        self._memory[place] = block.numpy().view(self._memory.dtype).reshape(self._memory[place].shape)

    def _note(self, _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Routers run in the order of their layers."""
        self._pass.append(output[2])
