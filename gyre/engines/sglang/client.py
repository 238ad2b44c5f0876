"""HTTP to one SGLang server: typed errors, one event after the other."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from gyre.core.errors import GyreError, PeerLost
from gyre.engines.sglang.wire import Event

_SSE = "data: "
_decoder = msgspec.json.Decoder(Event)


class Refused(GyreError):
    """The server answered that it will not do this; it goes on serving."""


class SglangClient:
    def __init__(self, url: str, secret: str, control_timeout_s: float) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=httpx.Timeout(control_timeout_s),
            # A connection for every running request; the engine bounds how many there are.
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[Event]:
        """Events of one request, until its stream ends. Raises Refused, PeerLost."""
        try:
            async with self._http.stream("POST", "/generate", json=body, timeout=None) as response:
                if response.status_code != 200:
                    raise Refused(f"SGLang refused the request: {_reason(await response.aread())}")
                async for line in response.aiter_lines():
                    if line.startswith(_SSE) and line != _SSE + "[DONE]":
                        yield _decoder.decode(line.removeprefix(_SSE))
        except httpx.TransportError as error:
            raise PeerLost(f"SGLang at {self._url} is not reachable: {error!r}") from error

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The answer's body. Raises Refused, PeerLost."""
        try:
            response = await self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise PeerLost(f"SGLang at {self._url} did not answer {path}: {error!r}") from error
        if response.status_code != 200:
            raise Refused(f"SGLang refused {path} ({response.status_code}): {_reason(response.content)}")
        return response.content


def _reason(content: bytes) -> str:
    return content.decode(errors="replace")[:500]
