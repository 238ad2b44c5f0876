"""The whole proxy over HTTP with scripted engines, in this process."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from proxy_fakes import Link, Script, ScriptedEngine
from starlette.types import ASGIApp

from gyre.chat.render import ChatRenderer
from gyre.core.clock import SystemClock
from gyre.core.records import CallRecord, SessionAccess
from gyre.engines.base import Sampling
from gyre.proxy.base import EngineRoute, SessionSpec
from gyre.proxy.config import ProxySection
from gyre.proxy.control import Profile, Proxy
from gyre.proxy.http.routes import SessionRegistry, create_app
from gyre.proxy.http.server import bind, serve_http
from gyre.proxy.router.router import Router, RouterLimits
from gyre.proxy.session.intake import IntakeBounds
from gyre.proxy.session.log import LoggedCall
from gyre.proxy.session.services import CallBounds, Services
from gyre.proxy.session.session import Session
from gyre.proxy.session.tokenizer import PolicyTokenizer
from gyre.trajectory.roles import RoleMarkers


class MemorySink:
    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self.calls: list[LoggedCall] = []
        self.fail: Exception | None = None
        self.on_put: Callable[[], object] = lambda: None

    async def put(self, record: CallRecord, logged: LoggedCall) -> None:
        if self.fail is not None:
            raise self.fail
        self.records.append(record)
        self.calls.append(logged)
        self.on_put()


class FakeProfile(msgspec.Struct, frozen=True):
    markers: RoleMarkers = RoleMarkers(
        sub_agent_headers=["x-claude-code-agent-id"],
        agent_id_headers=["x-claude-code-agent-id"],
        auxiliary_models=["small-model"],
    )
    canned_answers: Mapping[str, str] = msgspec.field(default_factory=lambda: {"small-model": "A title"})


class App:
    """`base` is the URL of the HTTP server."""

    def __init__(
        self, tokenizer: Any, answer: Callable[[str], str], *, cells: int, keepalive_s: float, max_context: int,
        running: int, coalesce_s: float, hold_s: float, max_body_bytes: int = 2**20,
        max_receiving_bytes: int = 2**27, client_timeout_s: float = 10.0, stall_s: float = 10.0,
        replay_routing: bool = False,
        profile: Profile | None = None, wrap: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:  # fmt: skip
        self.script = Script(tokenizer, answer)
        self.engines: dict[int, Any] = {cell: ScriptedEngine(self.script, version=cell) for cell in range(cells)}
        renderer = ChatRenderer(PolicyTokenizer(tokenizer), "qwen3", thinking=False)
        router_limits = RouterLimits(hold_s=hold_s, stall_s=stall_s, drain_s=1.0, retry_s=0.02)
        self.router = Router(lambda address: Link(self.engines[int(address[4:])]), router_limits)
        self.sink = MemorySink()
        self.bounds = CallBounds(max_context=max_context, max_new_tokens=4000, running=running)
        services = Services(
            renderer=renderer,
            router=self.router,
            sink=self.sink,
            clock=SystemClock(),
            sampling=Sampling(stop_token_ids=renderer.stop_token_ids),
            bounds=self.bounds,
            intake=IntakeBounds(requests=running, size=max_receiving_bytes, share=1.0),
            coalesce_s=coalesce_s,
            replay_routing=replay_routing,
        )
        registry = SessionRegistry()
        self.proxy = Proxy(services, registry, lambda name: profile or FakeProfile())
        limits = ProxySection(keepalive_s=keepalive_s, client_timeout_s=client_timeout_s, max_body_bytes=max_body_bytes)
        self.asgi = create_app(registry, limits)
        if wrap is not None:
            self.asgi = wrap(self.asgi)
        self.base = ""
        self.access = SessionAccess(path="", api_key="")
        self.session_id = ""
        self._opened = 0

    def route(self, cell: int) -> EngineRoute:
        return EngineRoute(cell=cell, address=f"mem:{cell}", capacity=8)

    def session(self, execution_id: str = "") -> Session:
        return self.proxy._sessions[execution_id or self.session_id]

    async def open_another(self) -> None:
        """`access` is then that of a new session."""
        self._opened += 1
        self.session_id = f"g0-{self._opened - 1}"
        self.access = await self.proxy.open_session(SessionSpec(execution_id=self.session_id, harness="fake"))

    @property
    def url(self) -> str:
        return self.base + self.access.path

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.access.api_key}"}


@contextlib.asynccontextmanager
async def running_app(
    tokenizer: Any, answer: Callable[[str], str], *, unix: Path | None = None, **settings: Any
) -> AsyncIterator[App]:
    """An app with one open session, g0-0, and every engine admitting; it also listens on `unix`."""
    defaults = {
        "cells": 1, "keepalive_s": 5.0, "max_context": 100_000, "running": 8, "coalesce_s": 0.0, "hold_s": 5.0,
    }  # fmt: skip
    app = App(tokenizer, answer, **{**defaults, **settings})
    listener = bind(socket.AF_INET, ("127.0.0.1", 0))
    sockets = [listener] if unix is None else [listener, bind(socket.AF_UNIX, str(unix))]
    if unix is not None:
        unix.chmod(0o666)
    async with serve_http(app.asgi, sockets):
        app.base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await app.open_another()
        app.router.set_routes([app.route(cell) for cell in app.engines])
        yield app
        await app.proxy.close()


def plain_client(**settings: Any) -> httpx.AsyncClient:
    """For `http://` only: reading the certificates of this machine, as httpx would, takes longer than most tests."""
    return httpx.AsyncClient(verify=False, **settings)
