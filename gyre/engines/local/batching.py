"""Everything that reaches into transformers' continuous batching (5.24): one place to look at when its version changes.

The library's generation thread alternates "schedule, forward, hand out tokens". It is parked between two passes while
somebody holds `pause`, and every method marked *paused* may only be called then. So a version that changes under a
pause is exactly the version of every later token.
"""

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from gyre.core.expert_routing import ExpertRouting
from gyre.engines.local import attention, handoff, kv
from gyre.engines.local.config import LocalEngineConfig
from gyre.engines.local.expert_routing import ExpertRoutingMemory
from gyre.engines.local.sampling import Sampler


class Produced(msgspec.Struct, kw_only=True):
    """What one forward pass added to one request."""

    request_id: str
    prompt_ids: list[int]
    cached_tokens: int
    output_ids: list[int]
    logprobs: list[float]
    version: int
    finished: bool
    error: str | None
    routing: ExpertRouting | None


class TrackingScheduler(FIFOScheduler):  # type: ignore[misc]
    """First come, first served; knows what the prefix cache served, and can start running requests over."""

    routing: ExpertRoutingMemory | None = None

    def reset(self) -> None:
        super().reset()
        self.cached_tokens: dict[str, int] = {}
        self.delivered: dict[str, int] = {}

    def forget_kv(self) -> None:
        """*Paused.* No KV that exists now is used again: running requests are prefilled anew, with what they generated
        as part of their prompt, and go on where they were."""
        for state in list(self.active_requests.values()):
            again = state.create_equivalent_initial_request()
            super().finish_request(state.request_id)
            self.add_waiting_request(again)
        self.cache.evict_cached_blocks()
        for allocator in self.cache.cache_allocators.values():
            allocator.ledger.hash_to_block.clear()
            allocator.ledger.block_to_hash.clear()

    def schedule_batch(self, *budgets: int) -> Any:
        # The library puts requests back until a running one finishes. Those that were cancelled never do.
        if not self.active_requests:
            self.block_new_requests = False
        return super().schedule_batch(*budgets)

    def _try_to_meet_safety_margin(self) -> bool:
        """Makes room for the next pass by evicting the blocks that were unused longest; the library evicts all of them,
        which would cost every waiting conversation its prefix. Returns whether the safety margin is met."""
        cache = self.cache
        demand = len(self.active_requests) + sum(
            len(state.remaining_prefill_tokens) // allocator.tokens_per_page + 1
            for allocator in cache.cache_allocators.values()
            for state in (*self.active_requests.values(), *self.waiting_requests.values())
        )
        for allocator in cache.cache_allocators.values():
            free = (
                cache.pool.count_free_blocks(allocator.index)
                + cache.pool.num_free_sectors * allocator.blocks_per_sector
            )
            wanted = max(demand, math.ceil(self.safety_margin * allocator.num_blocks)) - free
            ledger = allocator.ledger
            evicted = list(itertools.islice(ledger.cached_blocks, max(0, wanted)))
            for block in evicted:
                del ledger.cached_blocks[block]
                del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
            cache.pool.free_blocks(allocator.index, evicted)
        cache.pool.try_to_free_sectors()
        return bool(cache.compute_free_capacity() >= self.safety_margin)

    def _infer_request_tokens(self, state: Any, request_ids_to_remove_from_waiting: set[str]) -> Any:
        before = state.position_offset
        tokens = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        self.cached_tokens.setdefault(state.request_id, state.position_offset - before)
        return tokens

    def clear_cancelled_requests(self) -> Any:
        cancelled = super().clear_cancelled_requests()
        for state in cancelled:
            self.forget(state.request_id)
        return cancelled

    def forget(self, request_id: str) -> None:
        """The request gets no more tokens."""
        self.cached_tokens.pop(request_id, None)
        self.delivered.pop(request_id, None)
        if self.routing is not None:
            self.routing.forget(request_id)


SCHEDULER_MAPPING["gyre"] = TrackingScheduler
ATTN_TYPE_TO_ALLOCATOR[kv.InPlaceAllocator.layer_type] = kv.InPlaceAllocator


class _Router(OutputRouter):  # type: ignore[misc]
    """Turns the library's cumulative outputs into what each pass added, stamped with the version of that pass."""

    def __init__(self, deliver: Callable[[list[Produced]], None]) -> None:
        super().__init__()
        self.version = -1
        self.scheduler: Any = None
        self._deliver = deliver

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._deliver([self._added(output) for output in outputs])

    def _added(self, output: Any) -> Produced:
        key, finished = output.request_id, output.is_finished()
        start = self.scheduler.delivered.get(key, 0)
        cached = self.scheduler.cached_tokens.get(key, 0)
        routing = None if self.scheduler.routing is None else self.scheduler.routing.take(key)
        if finished:
            self.scheduler.forget(key)
        else:
            self.scheduler.delivered[key] = len(output.generated_tokens)
        return Produced(
            request_id=key,
            prompt_ids=output.prompt_ids if start == 0 else [],
            cached_tokens=cached if start == 0 else 0,
            output_ids=output.generated_tokens[start:],
            logprobs=output.logprobs[start:],
            version=self.version,
            finished=finished,
            error=output.error,
            routing=routing,
        )


class _Status(BackgroundThreadStatus):  # type: ignore[misc]
    """Tells the engine when the generation thread dies."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self._failed = failed

    def record_fatal_error(self, error: Exception) -> None:
        super().record_fatal_error(error)
        self._failed(error)


class Batcher:
    """One generation thread with its KV memory over one model. Callbacks run on the generation thread."""

    def __init__(
        self,
        model: Any,
        config: LocalEngineConfig,
        sampler: Sampler,
        deliver: Callable[[list[Produced]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        # Logits processors exist per request only if the defaults need them, hence a temperature that is not 1.
        sampling = GenerationConfig(
            do_sample=True, temperature=0.5, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(
            page_size=config.section.page_size,
            num_blocks=config.section.kv_blocks,
            max_batch_tokens=config.section.max_batch_tokens,
            max_requests_per_batch=config.section.max_requests,
            scheduler_type="gyre",
            return_logprobs=True,
            auto_switch_to_flash=False,
            per_request_processors=True,
        )
        self._manager = model.init_continuous_batching(sampling, batching)
        model.set_attn_implementation(attention.NAME)
        self._router = _Router(deliver)
        self._manager.output_router = self._router
        self._manager.background_thread_status = _Status(failed)
        # Creates the KV memory here and now instead of later on the generation thread.
        self._manager.warmup()
        processor = self._manager.batch_processor
        processor.model_runner._sample = sampler.draw_into
        self._scheduler: TrackingScheduler = processor.scheduler
        self._router.scheduler = self._scheduler
        if config.replay_routing:
            self._keep_routing(model, processor)
        with torch.inference_mode():
            self._manager.start()

    def _keep_routing(self, model: Any, processor: Any) -> None:
        routing = self._scheduler.routing = ExpertRoutingMemory(model, self._allocator)
        forward = processor._generation_step

        def step(model: Any) -> None:
            forward(model)
            routing.after_pass(processor.inputs_and_outputs)

        processor._generation_step = step

    def stop(self) -> None:
        """Ends the thread and frees the KV memory; what still runs is given up. Not while paused by this thread."""
        self._manager.stop(block=True, hard_stop=True)

    def pause(self) -> AbstractContextManager[None]:
        """Parks the generation thread between two passes. Nests; enter and leave it from one thread."""
        return self._manager.pause()  # type: ignore[no-any-return]

    def add(
        self,
        request_id: str,
        input_ids: list[int],
        max_new: int,
        stop: list[int],
        temperature: float,
        routing_from: int | None,
    ) -> None:
        if routing_from is not None and self._scheduler.routing is not None:
            self._scheduler.routing.begin(request_id, routing_from)
        self._manager.add_request(
            input_ids,
            request_id=request_id,
            max_new_tokens=max_new,
            streaming=True,
            eos_token_id=stop or [-1],
            temperature=float(temperature),
        )

    def cancel(self, request_id: str) -> None:
        self._manager.cancel_request(request_id)

    def set_version(self, version: int) -> None:
        """*Paused.* Later tokens carry `version`, and nothing of them rests on KV of earlier versions."""
        self._scheduler.forget_kv()
        self._router.version = version

    @property
    def kv_layout(self) -> str:
        return handoff.layout(self._allocator, self._scheduler.routing)

    def take_kv(self, input_ids: list[int]) -> torch.Tensor:
        """*Paused.* Bytes [blocks, bytes of a block] of the longest prefix in memory."""
        return handoff.take(self._allocator, self._scheduler.routing, input_ids)

    def put_kv(self, input_ids: list[int], blocks: torch.Tensor) -> tuple[int, int]:
        """*Paused.* Returns the blocks of the prefix in memory after what fits was stored, and those that were."""
        return handoff.put(self._allocator, self._scheduler.routing, input_ids, blocks)

    @property
    def _allocator(self) -> Any:
        """The attention is plain, so all layers share one."""
        (allocator,) = self._scheduler.cache.cache_allocators.values()
        return allocator

    def kv_blocks_in_use(self) -> int:
        """Blocks that running requests hold; approximate while a pass runs."""
        cache = self._scheduler.cache
        used = 0
        for allocator in cache.cache_allocators.values():
            free = cache.pool.count_free_blocks(allocator.index)
            free += cache.pool.num_free_sectors * allocator.blocks_per_sector
            used += allocator.num_blocks - free - len(allocator.ledger.cached_blocks)
        return used
