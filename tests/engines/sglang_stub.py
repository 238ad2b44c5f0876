"""A server with SGLang 0.5.23's endpoints and wire format, sampling with Gyre's local engine.

Statuses, field names and cumulative streaming follow `srt/entrypoints/http_server.py` and
`srt/managers/tokenizer_manager.py` of that release.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gyre.core.errors import GyreError
from gyre.engines.base import GenerateRequest, PauseMode, Sampling
from gyre.engines.local.config import LocalEngineConfig
from gyre.engines.local.engine import LocalEngine
from gyre.transport.shm import ShmTransport


class SglangStub:
    def __init__(self, config: LocalEngineConfig, transport: ShmTransport) -> None:
        self.engine = LocalEngine(config, transport)
        self.transport = transport
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        routes = [
            Route(f"/{handler.__name__}", handler, methods=["POST"])
            for handler in (
                self.generate,
                self.abort_request,
                self.pause_generation,
                self.continue_generation,
                self.update_weights_from_disk,
                self.release_memory_occupation,
                self.resume_memory_occupation,
            )
        ]
        self.app = Starlette(routes=routes)

    async def generate(self, http: Request) -> Response:
        body = await http.json()
        assert body["stream"]
        assert body["return_logprob"]
        await self.unpaused.wait()
        sampling = body["sampling_params"]
        stops = [] if sampling["ignore_eos"] else sampling["stop_token_ids"]
        request = GenerateRequest(
            request_id=body["rid"],
            input_ids=body["input_ids"],
            max_new_tokens=sampling["max_new_tokens"],
            sampling=Sampling(temperature=sampling["temperature"], stop_token_ids=stops),
        )
        chunks = self.engine.generate(request)
        try:
            first = await anext(chunks)
        except GyreError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        return StreamingResponse(self.events(body, first, chunks), media_type="text/event-stream")

    async def events(self, body, first, chunks):
        logprobs, versions = [], []

        def event(chunk) -> str:
            logprobs.extend([lp, token, None] for lp, token in zip(chunk.logprobs, chunk.output_ids, strict=True))
            versions.extend(chunk.versions)
            spans = []
            for i, version in enumerate(versions):
                if spans and spans[-1]["version"] == str(version):
                    spans[-1]["end"] = i + 1
                else:
                    spans.append({"version": str(version), "start": i, "end": i + 1})
            meta = {
                "id": body["rid"],
                "finish_reason": None if chunk.finish is None else {"type": chunk.finish},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(versions),
                "cached_tokens": first.cached_tokens,
                "output_token_logprobs": logprobs,
                "weight_versions": spans,
            }
            out = {"output_ids": [token for _, token, _ in logprobs], "meta_info": meta}
            if body.get("return_prompt_token_ids"):
                out["prompt_token_ids"] = first.prompt_ids
            return f"data: {json.dumps(out)}\n\n"

        async with contextlib.aclosing(chunks):
            yield event(first)
            async for chunk in chunks:
                yield event(chunk)
        yield "data: [DONE]\n\n"

    async def abort_request(self, http: Request) -> Response:
        body = await http.json()
        await self.engine.abort("" if body.get("abort_all") else body["rid"])
        return Response(status_code=200)

    async def pause_generation(self, http: Request) -> Response:
        mode = (await http.json()).get("mode", "abort")
        self.unpaused.clear()
        await self.engine.pause(PauseMode.ABORT if mode == "abort" else PauseMode.IN_PLACE)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: Request) -> Response:
        await self.engine.resume()
        self.unpaused.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, http: Request) -> Response:
        body = await http.json()
        assert (Path(body["model_path"]) / "config.json").is_file()
        tensors = load_file(Path(body["model_path"]) / "model.safetensors")
        try:
            await self.engine.update_weights(self.transport.publish(int(body["weight_version"]), tensors))
        except GyreError as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def release_memory_occupation(self, http: Request) -> Response:
        assert (await http.json())["tags"] == ["weights", "kv_cache"]
        await self.engine.release()
        return Response(status_code=200)

    async def resume_memory_occupation(self, http: Request) -> Response:
        await self.engine.restore()
        return Response(status_code=200)


@contextlib.asynccontextmanager
async def serving(stub: SglangStub):
    """Runs the stub on a free port; yields its base URL."""
    server = uvicorn.Server(uvicorn.Config(stub.app, port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(20):
            while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
