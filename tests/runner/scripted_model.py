"""A model that plays a script, on a unix socket: Anthropic Messages (streamed) and Chat Completions (not)."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class ScriptedModel:
    """Answers the n-th model call with the n-th shell command, and ends the run after the last."""

    def __init__(self, commands: list[str]) -> None:
        self.commands = commands
        self.paths: list[str] = []
        """Method and path of every request, model call or not."""
        self.keys: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: Request) -> Response:
        self.paths.append(f"{request.method} {request.url.path}")
        if request.method != "POST":
            return Response()
        self.keys.append(request.headers.get("x-api-key") or request.headers["authorization"].removeprefix("Bearer "))
        call = len(self.bodies)
        self.bodies.append(await request.json())
        command = self.commands[call] if call < len(self.commands) else None
        if request.url.path.endswith("/chat/completions"):
            return JSONResponse(_chat(call, command or SUBMIT))
        return StreamingResponse(_messages(call, command), media_type="text/event-stream")


@asynccontextmanager
async def serving(model: ScriptedModel, path: Path) -> AsyncIterator[ScriptedModel]:
    """Serves until left; the socket accepts connections from the start."""
    routes = [Route("/{path:path}", model.answer, methods=["GET", "HEAD", "POST"])]
    config = uvicorn.Config(Starlette(routes=routes), uds=str(path), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield model
    finally:
        await server.shutdown()


async def _messages(call: int, command: str | None) -> AsyncIterator[str]:
    usage = {"input_tokens": 10, "output_tokens": 1}
    message = {"id": f"msg_{call}", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    if command is None:
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": "Done."}
    else:
        block = {"type": "tool_use", "id": f"toolu_{call}", "name": "Bash", "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps({"command": command})}
    reason = "end_turn" if command is None else "tool_use"
    for event in (
        {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": 5},
        },
        {"type": "message_stop"},
    ):
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _chat(call: int, command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{call}", "type": "function", "function": function}],
    }
    return {
        "id": f"chat_{call}",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
