"""`Engine` over the HTTP endpoints of one SGLang server.

Differences that callers may notice: a pause in place is SGLang's "retract" (requests stay, but their KV is recomputed
after `resume`), because only then can the prefix cache be dropped under running requests; counters in `status` count
what arrived here; the digest is that of the published weights the server said it loaded.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from gyre.core.errors import GyreError, NotReady, PeerLost, WeightsUnavailable
from gyre.engines.base import EngineStatus, GenerateChunk, GenerateRequest, PauseMode
from gyre.engines.sglang.config import SglangConfig
from gyre.engines.sglang.wire import ChunkReader
from gyre.transport.base import WeightRef, WeightTransport

_TAGS = ["weights", "kv_cache"]
_SSE = "data: "


class SglangEngine:
    """`transport` must publish safetensors files (`ShmTransport` does): the server loads them where they lie."""

    def __init__(self, config: SglangConfig, transport: WeightTransport) -> None:
        self._config = config
        self._transport = transport
        self._http = httpx.AsyncClient(base_url=config.base_url, timeout=httpx.Timeout(config.control_timeout_s))
        self._changing = asyncio.Lock()
        self._running: set[str] = set()
        self._paused: PauseMode | None = None
        self._released = False
        self._version = -1
        self._checksum = ""
        self._generated = 0
        self._cached = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self._admit(request)
        body = {
            "rid": request.request_id,
            "input_ids": request.input_ids,
            "sampling_params": {
                "temperature": request.sampling.temperature,
                "top_p": 1.0,
                "max_new_tokens": min(request.max_new_tokens, self._config.max_context - len(request.input_ids)),
                "stop_token_ids": request.sampling.stop_token_ids,
                # The server's `ignore_eos` ignores stop_token_ids as well, so it serves only requests without any.
                "ignore_eos": not request.sampling.stop_token_ids,
            },
            "stream": True,
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }
        self._running.add(request.request_id)
        finished = False
        try:
            async for chunk in self._stream(body):
                self._generated += len(chunk.output_ids)
                self._cached += chunk.cached_tokens
                finished = chunk.finish is not None
                yield chunk
            if not finished:
                raise PeerLost(f"SGLang at {self._config.base_url} ended request {request.request_id} without a reason")
        finally:
            self._running.discard(request.request_id)
            if not finished:
                # The caller left, or the stream broke: the server must not go on. It may be gone itself.
                await asyncio.shield(asyncio.ensure_future(self._abandon(request.request_id)))

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[GenerateChunk]:
        reader = ChunkReader()
        try:
            async with self._http.stream("POST", "/generate", json=body, timeout=None) as response:
                if response.status_code != 200:
                    raise GyreError(f"SGLang refused the request: {_reason(await response.aread())}")
                async for line in response.aiter_lines():
                    if line.startswith(_SSE) and line != _SSE + "[DONE]":
                        yield reader.read(line.removeprefix(_SSE))
        except httpx.TransportError as error:
            raise PeerLost(f"SGLang at {self._config.base_url} is not reachable: {error!r}") from error

    def _admit(self, request: GenerateRequest) -> None:
        if self._released:
            raise NotReady("the engine's memory is released; restore it and update its weights first")
        if self._version < 0:
            raise NotReady("the engine has no weights yet; update_weights first")
        if self._paused is PauseMode.ABORT:
            raise NotReady("the engine is paused and admits nothing; resume it or use another one")
        if request.request_id in self._running:
            raise GyreError(f"request id {request.request_id} is already running; ids are unique while running")
        sampling, length = request.sampling, len(request.input_ids)
        if sampling.top_p != 1.0:
            raise GyreError(f"top_p = {sampling.top_p} is refused: SGLang reports log-probs of the whole distribution")
        if not sampling.temperature > 0.0:
            raise GyreError(f"temperature = {sampling.temperature} is refused: it must be positive")
        if length == 0 or request.max_new_tokens < 1:
            raise GyreError(
                f"request of {length} prompt and {request.max_new_tokens} new tokens: both must be positive"
            )
        if length >= self._config.max_context:
            raise GyreError(
                f"prompt of {length} tokens does not fit the engine's context of {self._config.max_context}"
            )

    async def abort(self, request_id: str) -> None:
        await self._post("/abort_request", {"rid": request_id} if request_id else {"abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        async with self._changing:
            self._paused = mode
            if not self._released:
                await self._post("/pause_generation", {"mode": "abort" if mode is PauseMode.ABORT else "retract"})

    async def resume(self) -> None:
        async with self._changing:
            if self._paused is not None and not self._released:
                await self._post("/continue_generation", {})
            self._paused = None

    async def update_weights(self, ref: WeightRef) -> None:
        async with self._changing:
            if self._released:
                raise NotReady("the engine's memory is released; restore it before update_weights")
            view = await asyncio.to_thread(self._view, ref)
            # Unpaused, the server would wait until no request runs.
            if self._paused is None:
                await self._post("/pause_generation", {"mode": "retract"})
            try:
                await self._load(ref, view)
            finally:
                if self._paused is None:
                    await self._post("/continue_generation", {})
                shutil.rmtree(view)

    async def _load(self, ref: WeightRef, view: Path) -> None:
        body = {"model_path": str(view), "weight_version": str(ref.version), "flush_cache": True}
        try:
            await self._post("/update_weights_from_disk", body)
        except PeerLost:
            raise
        except GyreError as error:
            raise WeightsUnavailable(f"version {ref.version} was not loaded: {error}") from error
        self._version, self._checksum = ref.version, ref.checksum

    def _view(self, ref: WeightRef) -> Path:
        """A model directory whose weights are the snapshot, after its digest was verified."""
        self._transport.pull(ref)
        view = Path(self._config.exchange_dir) / f"v{ref.version:08d}-{ref.checksum}"
        shutil.rmtree(view, ignore_errors=True)
        view.mkdir(parents=True)
        for file in Path(self._config.model_dir).resolve().iterdir():
            if not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
                (view / file.name).symlink_to(file)
        (view / "model.safetensors").symlink_to(Path(ref.uri).resolve())
        return view

    async def release(self) -> None:
        async with self._changing:
            if self._running:
                raise NotReady(f"{len(self._running)} requests are running; pause with abort before release")
            if not self._released:
                await self._post("/release_memory_occupation", {"tags": _TAGS})
            self._released, self._version, self._checksum = True, -1, ""

    async def restore(self) -> None:
        async with self._changing:
            if self._released:
                await self._post("/resume_memory_occupation", {"tags": _TAGS})
                # What `pause` and `resume` were told meanwhile.
                await self._post("/pause_generation", {"mode": "abort"})
                if self._paused is None:
                    await self._post("/continue_generation", {})
            self._released = False

    async def status(self) -> EngineStatus:
        return EngineStatus(
            version=self._version,
            running=len(self._running),
            paused=self._paused is not None,
            released=self._released,
            generated_tokens=self._generated,
            cached_tokens=self._cached,
            weights_checksum=self._checksum,
        )

    async def _abandon(self, request_id: str) -> None:
        try:
            await self.abort(request_id)
        except PeerLost:
            return

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            response = await self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise PeerLost(f"SGLang at {self._config.base_url} did not answer {path}: {error!r}") from error
        if response.status_code != 200:
            raise GyreError(f"SGLang refused {path} ({response.status_code}): {_reason(response.content)}")


def _reason(content: bytes) -> str:
    return content.decode(errors="replace")[:500]
