"""Real harness binaries against the whole proxy with a scripted policy; helpers of `test_harness_*.py`."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proxy_app import App, running_app
from proxy_fakes import ScriptedEngine, tool_call
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gyre.core.records import CallRecord, RoleClass
from gyre.harnesses import ContextWindow, HarnessProfile, load_profile, prefix_of, prepare
from gyre.harnesses.launch import SANDBOX_PREFIX
from gyre.trajectory.tree import TrajectoryTree

CLAUDE = ["claude_code", "claude_code_328"]
OPENCODE = ["opencode", "opencode_messages", "opencode_responses"]
PI = ["pi", "pi_messages", "pi_responses"]
EVERY = [*CLAUDE, "codex", "qwen_code", *OPENCODE, *PI, "mini_swe_agent"]

Rules = dict[str, str | Callable[[str], str]]
"""Text in the newest turn of the prompt → what the policy says, or a function of the whole prompt; the first that fits
counts."""


def installed(name: str, *, argv: list[str] | None = None, **changes: dict[str, str]) -> HarnessProfile:
    """The profile with arguments added and `env=` or `files=` entries changed; skips the test when the harness is not
    installed."""
    profile = load_profile(name)
    if not prefix_of(profile).exists():
        pytest.skip(f"{name} is not installed; run: gyre setup {name}")
    merged = {table: {**getattr(profile, table), **entries} for table, entries in changes.items()}
    return msgspec.structs.replace(profile, argv=[*profile.argv, *(argv or [])], **merged)


def shell(name: str, command: str) -> str:
    """A call of the harness's own shell tool."""
    if name == "codex":
        return call("exec_command", cmd=command)
    if name in CLAUDE:
        return call("Bash", command=command)
    if name in OPENCODE:
        return call("bash", command=command, description="A step")
    if name == "qwen_code":
        return call("run_shell_command", command=command, is_background=False)
    return call("bash", command=command)


def call(tool: str, **arguments: Any) -> str:
    return tool_call(tool, msgspec.json.encode(arguments).decode())


def says(rules: Rules, unscripted: list[str]) -> Callable[[str], str]:
    def answer(prompt: str) -> str:
        newest = prompt.rsplit("<|im_start|>user", 1)[-1].rsplit("<|im_start|>assistant", 1)[0]
        for marker, text in rules.items():
            if marker in newest:
                return text if isinstance(text, str) else text(prompt)
        unscripted.append(newest[-3000:])
        return "The script has no answer."

    return answer


class Hold:
    """Makes the engine stop inside its n-th answer (from 1), after twenty tokens, until the call is cancelled."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.reached = asyncio.Event()

    def on(self, engine: ScriptedEngine) -> None:
        async def step(done: int) -> None:
            if len(engine.requests) == self._number and done >= 20:
                self.reached.set()
                await asyncio.Event().wait()

        engine.step = step


class Faults:
    """Between harness and proxy. By number of a model request (from 1): an error answer with `retry-after: 1`, or an
    answer of which three pieces go out and whose connection is cut when the given event happens."""

    def __init__(self, *, errors: dict[int, int] | None = None, cuts: dict[int, asyncio.Event] | None = None) -> None:
        self._errors = errors or {}
        self._cuts = cuts or {}
        self._app: ASGIApp | None = None
        self.requests = 0

    def around(self, app: ASGIApp) -> ASGIApp:
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self.requests += 1
        if self.requests in self._errors:
            body = msgspec.json.encode({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
            answer = Response(body, self._errors[self.requests], {"retry-after": "1"}, media_type="application/json")
            await answer(scope, receive, send)
            return
        cut, pieces = self._cuts.get(self.requests), 0

        async def cutting(message: Message) -> None:
            nonlocal pieces
            await send(message)
            pieces += message["type"] == "http.response.body"
            if cut is not None and pieces == 3:
                await cut.wait()
                raise _Cut

        # uvicorn closes the connection of an application that returns before its answer is complete.
        with contextlib.suppress(_Cut):
            await self._app(scope, receive, cutting)


class Refusals:
    """Between harness and proxy: error statuses that model requests were answered with."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def around(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            async def watching(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] >= 400:
                    self.statuses.append(message["status"])
                await send(message)

            await app(scope, receive, watching if scope.get("method") == "POST" else send)

        return watched


class _Cut(Exception):
    pass


class Running:
    def __init__(self, process: asyncio.subprocess.Process, stdin: str) -> None:
        self._process = process
        self._output = asyncio.ensure_future(process.communicate(stdin.encode()))

    def interrupt(self) -> None:
        """As a terminal does: some harnesses run as a child of their own wrapper."""
        os.killpg(self._process.pid, signal.SIGINT)

    async def end(self) -> tuple[int, str]:
        """Exit code and everything that the harness printed."""
        output, _ = await self._output
        assert self._process.returncode is not None
        return self._process.returncode, output.decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def harness(
    profile: HarnessProfile, app: App, home: Path, instruction: str, window: int | None = None, seconds: float = 180
) -> AsyncIterator[Running]:
    """The installed harness, started as its profile says, with nothing of this machine in its environment. `window`
    tells it another context window than the policy's; `seconds` is its time."""
    prefix = prefix_of(profile)
    launch = prepare(
        profile,
        prefix,
        instruction=instruction,
        access=app.access,
        proxy_url=app.base,
        home=str(home),
        window=ContextWindow(max_context=window or app.bounds.max_context, max_output=app.bounds.max_new_tokens),
    )
    workspace = home / "workspace"
    workspace.mkdir()
    for path, content in launch.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(content)
    process = await asyncio.create_subprocess_exec(
        # As in a sandbox: a shell's background job ignores SIGINT, and so would all that it starts.
        *("env", "--default-signal"),
        *(argument.replace(SANDBOX_PREFIX, str(prefix)) for argument in launch.argv),
        cwd=workspace,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", **launch.env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    running = Running(process, launch.stdin)
    try:
        async with asyncio.timeout(seconds):
            yield running
    finally:
        running.kill()
        await running.end()


@contextlib.asynccontextmanager
async def proxy_for(tokenizer: Any, profile: HarnessProfile, rules: Rules, **settings: Any) -> AsyncIterator[App]:
    defaults = {"max_context": 2**20, "max_body_bytes": 2**23, "profile": profile}
    unscripted: list[str] = []
    async with running_app(tokenizer, says(rules, unscripted), **{**defaults, **settings}) as app:
        yield app
    assert not unscripted, unscripted[0]


async def run(
    tokenizer: Any,
    profile: HarnessProfile,
    home: Path,
    rules: Rules,
    *,
    hold: Hold | None = None,
    code: int = 0,
    window: int | None = None,
    **settings: Any,
) -> App:
    """Runs it to its end, which must have that exit code; returns the app with everything recorded."""
    async with proxy_for(tokenizer, profile, rules, **settings) as app:
        if hold is not None:
            hold.on(app.engines[0])
        async with harness(profile, app, home, "Do the steps.", window) as running:
            ended, output = await running.end()
        assert ended == code, output[-3000:]
        return app


def roles(app: App) -> Counter[str]:
    """Recorded calls by role class."""
    return Counter(str(record.role) for record in app.sink.records)


def leaves(app: App) -> Counter[str]:
    """Leaves that training may draw, by role class; checks on the way that no token was encoded twice."""
    tree = check_tokens(app)
    return Counter(str(leaf.record.role) for leaf in tree.leaves() if leaf.eligible)


def check_tokens(app: App) -> TrajectoryTree:
    """Every prompt that an engine was sent is a recorded path plus new tokens, and none broke off from its turn."""
    tree = TrajectoryTree.from_records(app.sink.records)
    sent = {tuple(request.input_ids) for engine in app.engines.values() for request in engine.requests}
    for record in app.sink.records:
        assert "prefix_break" not in record.flags, record.flags
        before = tree.path_ids(record.parent)[: record.prefix_len] if record.parent else []
        assert tuple(before + record.delta_ids) in sent
    return tree


def chain(app: App, records: list[CallRecord], role: RoleClass = RoleClass.MAIN) -> None:
    """One path: every prompt begins with the whole of the call before, prompt and output, token for token."""
    tree = check_tokens(app)
    assert [record.role for record in records] == [role] * len(records)
    for before, after in itertools.pairwise(records):
        path = tree.path_ids(before.call_id)
        assert tree.path_ids(after.call_id)[: len(path)] == path
