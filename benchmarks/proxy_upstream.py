"""The model behind every proxy of `benchmarks/proxy.py`: it answers any request at once with the same turn.

Reads one JSON order on standard input, prints `{"http": PORT, "rpc": ADDRESS}`, serves until its input ends.
It is written on raw bytes, so that it costs next to nothing beside the proxies that are measured:
  http  OpenAI chat completions as vLLM answers them with `return_token_ids`, vLLM's `/inference/v1/generate`, and
        plain chat completions under `/direct`
  rpc   Gyre's Engine RPC; the digest of the prompt ids of the request comes back
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import msgspec

from gyre.core.tokens import TokenIds
from gyre.engines.base import Engine
from gyre.rpc.service import CHANNEL_OPTIONS, path


class Order(msgspec.Struct):
    output_ids: list[int]
    text: str
    call: dict[str, Any]
    """The tool call of the turn, in OpenAI's form."""
    prompt_tokens: int
    """How many prompt ids vLLM's answer repeats."""
    rpc: str


def completion(order: Order, token_ids: bool) -> bytes:
    """`token_ids`: with what a proxy needs for training, log-probs, output and prompt ids."""
    logprobs = {"content": [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * len(order.output_ids)}
    message = {"role": "assistant", "content": order.text, "tool_calls": [order.call]}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": order.prompt_tokens, "completion_tokens": len(order.output_ids)}
    answer = {
        "id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice],
        "usage": usage,
    }  # fmt: skip
    if token_ids:
        choice.update(logprobs=logprobs, token_ids=order.output_ids)
        answer["prompt_token_ids"] = [1000 + i % 40_000 for i in range(order.prompt_tokens)]
    return json.dumps(answer).encode()


def generated(order: Order) -> bytes:
    logprobs = {"content": [{"logprob": -0.5}] * len(order.output_ids)}
    choice = {"token_ids": order.output_ids, "logprobs": logprobs, "finish_reason": "stop"}
    return json.dumps({"choices": [choice]}).encode()


class Http(asyncio.Protocol):
    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers = answers
        self._head = bytearray()
        self._missing = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._head[:end]).lower()
            _, _, length = head.partition(b"\r\ncontent-length:")
            self._missing = int(length.split(b"\r\n")[0] or b"0") - (len(self._head) - end - 4)
            self._body = next((body for route, body in self._answers.items() if route in head[:200]), b"{}")
        else:
            self._missing -= len(data)
        if self._missing == 0:
            self._head.clear()
            self._missing = -1
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(self._body)
            self._transport.write(head + self._body)  # type: ignore[attr-defined]


class _Asked(msgspec.Struct):
    input_ids: bytes


class RawEngine(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, order: Order) -> None:
        size = len(order.output_ids)
        self._chunk = {
            "output_ids": order.output_ids, "logprobs": [-0.5] * size, "versions": [0] * size, "finish": "stop",
        }  # fmt: skip
        self._encoder = msgspec.msgpack.Encoder()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_stream_rpc_method_handler(self._generate) if call.method == path(Engine, "generate") else None

    async def _generate(self, data: bytes, _: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        # Arguments travel as a list of one struct.
        asked = msgspec.msgpack.decode(data, type=tuple[_Asked])[0]
        yield self._encoder.encode({**self._chunk, "prompt_digest": TokenIds(asked.input_ids).digest})


async def main() -> None:
    order = msgspec.json.decode(sys.stdin.readline().encode(), type=Order)
    answers = {
        b"/direct/": completion(order, token_ids=False),
        b"/chat/completions": completion(order, token_ids=True),
        b"/inference/v1/generate": generated(order),
    }
    loop = asyncio.get_running_loop()
    http = await loop.create_server(lambda: Http(answers), "127.0.0.1", 0)
    rpc = grpc.aio.server(options=CHANNEL_OPTIONS)
    rpc.add_generic_rpc_handlers((RawEngine(order),))
    rpc.add_insecure_port(order.rpc)
    await rpc.start()
    print(json.dumps({"http": http.sockets[0].getsockname()[1], "rpc": order.rpc}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    await rpc.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
