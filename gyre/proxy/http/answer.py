"""Writes one HTTP answer from the events of a call, while they happen.

The status line waits for the first event or at most `keepalive_s`: so a call that fails early is answered with a proper
status, and a slow one with headers and something that keeps the connection alive: events of the API in a stream, blanks
before the JSON of a whole answer. A client that goes away is noticed at
once, and the call learns of it; one that reads nothing for `client_timeout_s` counts as gone. An answer is delivered
when all of it went out and the client did not close its connection with a part of it unread.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gyre.proxy.dialects.base import Delta, Dialect, RequestFacts, TurnEnd
from gyre.proxy.errors import STATUS, CallError, Fault
from gyre.proxy.session.call import ModelCall, Reader

log = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_JSON_HEADERS = [(b"content-type", b"application/json"), (b"cache-control", b"no-cache")]


class _Unanswerable(Exception):
    """A call failed behind the first bytes of an answer that has no form for an error there."""


class ClientConnection(Protocol):
    """The connection that an answer goes out on; the server puts it into the request's state as "connection"."""

    def abort(self) -> None:
        """Closing would wait until the client has read what was sent."""
        ...

    @property
    def gone(self) -> bool: ...

    def on_unread(self, tell: Callable[[], None]) -> None:
        """`tell` is called when the client closes the connection with a part of the latest answer unread."""
        ...


class CallAnswer:
    """An ASGI response."""

    def __init__(
        self, call: ModelCall, dialect: Dialect, facts: RequestFacts, keepalive_s: float, client_timeout_s: float
    ) -> None:
        self._call = call
        self._dialect = dialect
        self._facts = facts
        self._keepalive_s = keepalive_s
        self._client_timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._client_timeout_s):
                await send(message)

        with self._call.follow() as reader:
            writing = asyncio.ensure_future(
                self._stream(reader, send_in_time) if self._facts.stream else self._whole(reader, send_in_time)
            )
            leaving = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
                    self._note_delivery(scope)
            except _Unanswerable:
                _abort(scope)
            except TimeoutError:
                log.warning("a client of call %s read nothing for %g s", self._call.head.id, self._client_timeout_s)
                _abort(scope)
            finally:
                writing.cancel()
                leaving.cancel()

    def _note_delivery(self, scope: Scope) -> None:
        connection = _connection(scope)
        if self._call.finished and not (connection is not None and connection.gone):
            self._call.delivered = True
            if connection is not None:
                connection.on_unread(self._call.not_read)

    async def _whole(self, reader: Reader, send: Send) -> None:
        started = False
        while True:
            try:
                events = await reader.next(self._keepalive_s)
            except CallError as error:
                if started:
                    # The status is gone. A broken answer is asked for again, a wrong one would be believed.
                    raise _Unanswerable from error
                await _send_response(error_response(self._dialect, error), send)
                return
            end = next((event for event in events if isinstance(event, TurnEnd)), None)
            if end is not None:
                body = msgspec.json.encode(self._dialect.response(self._facts, self._call.head, end))
                if started:
                    await send({"type": "http.response.body", "body": body, "more_body": False})
                else:
                    await _send_response(Response(body, media_type="application/json"), send)
                return
            if not events:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _JSON_HEADERS})
                    started = True
                await send({"type": "http.response.body", "body": b" ", "more_body": True})

    async def _stream(self, reader: Reader, send: Send) -> None:
        encoder = self._dialect.encoder(self._facts, self._call.head)
        started = ended = False
        while not ended:
            try:
                events = await reader.next(self._keepalive_s)
            except CallError as error:
                if not started:
                    await _send_response(error_response(self._dialect, error), send)
                    return
                await send({"type": "http.response.body", "body": encoder.error(error), "more_body": False})
                return
            out = b"" if started else encoder.start()
            for event in events:
                if isinstance(event, TurnEnd):
                    out += encoder.end(event)
                    ended = True
                elif event != Delta():
                    out += encoder.delta(event)
            if not events:
                out += encoder.keep_alive()
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                started = True
            if out:
                await send({"type": "http.response.body", "body": out, "more_body": not ended})


def _connection(scope: Scope) -> ClientConnection | None:
    """None for an application that is called in its own process, whose client reads everything."""
    connection: ClientConnection | None = scope.get("state", {}).get("connection")
    return connection


def _abort(scope: Scope) -> None:
    if (connection := _connection(scope)) is not None:
        connection.abort()


def error_response(dialect: Dialect, error: CallError) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.final:
        headers["x-should-retry"] = "false"
    if error.fault is Fault.TOO_SLOW:
        # What is left of the body would hold the connection open.
        headers["connection"] = "close"
    body = msgspec.json.encode(dialect.error_body(error))
    return Response(body, STATUS[error.fault], headers, media_type="application/json")


async def _send_response(response: Response, send: Send) -> None:
    start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
