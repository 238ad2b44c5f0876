"""Captures how the installed harnesses present a job and its tool results, in Gyre's canonical form.

    python examples/policy/capture.py

Each harness of the quickstart runs once, as its profile says, in an empty folder with a clean environment, against a
scripted answerer on loopback that asks for a few shell commands and then ends the run. What the harness sent is written
to .cache/policy/captured.json for fit.py; it holds the harnesses' own prose, so it is never committed.
"""

import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
from demonstrations import JOB_MARK, SUBMIT

from gyre.chat.conversation import Conversation, Message, ToolCall
from gyre.core.records import SessionAccess
from gyre.harnesses import ContextWindow, HarnessProfile, check, load_profile, prefix_of, prepare
from gyre.harnesses.launch import SANDBOX_PREFIX
from gyre.proxy.dialects import DIALECTS
from gyre.proxy.dialects.base import Delta, TurnEnd, TurnHead, Usage
from gyre.proxy.dialects.memo import Memo

HARNESSES = ("claude_code", "mini_swe_agent")
CAPTURED = Path(__file__).parents[2] / ".cache/policy/captured.json"
WINDOW = ContextWindow(max_context=2048, max_output=96)
"""Of the quickstart, whose prompts these are."""
PROBES = (("echo one > file", ""), ("cat file; echo two", "one\ntwo\n"), ("true", ""))
"""Commands that the scripted answerer asks for, with the output each must give."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one harness."""

    harness: str
    requests: list[Conversation]


class _Answerer(BaseHTTPRequestHandler):
    """Answers every model request with the next probe, then ends the run the way the harness expects."""

    requests: ClassVar[list[Conversation]]

    def do_HEAD(self) -> None:
        self._send(b"", "text/plain")

    def do_POST(self) -> None:
        dialect = DIALECTS["anthropic" if "/messages" in self.path else "chat"]
        body = self.rfile.read(int(self.headers["content-length"]))
        request = dialect.read(body, dict(self.headers.items()), Memo())
        self.requests.append(request.conversation)
        turn = sum(message.role == "assistant" for message in request.conversation.messages)
        end = TurnEnd(message=self._answer(turn, dialect.name), finish="stop", usage=Usage(prompt=1, output=1))
        head = TurnHead(id=f"msg_{turn}", model="policy-model", created=0, prompt_tokens=1)
        if request.facts.stream:
            encoder = dialect.encoder(request.facts, head)
            text = encoder.delta(Delta(text=end.message.text)) if end.message.text else b""
            self._send(encoder.start() + text + encoder.end(end), "text/event-stream")
        else:
            self._send(msgspec.json.encode(dialect.response(request.facts, head, end)), "application/json")

    def _answer(self, turn: int, dialect: str) -> Message:
        if turn >= len(PROBES) and dialect == "anthropic":
            return Message(role="assistant", text="Done.")
        command = PROBES[turn][0] if turn < len(PROBES) else SUBMIT
        call = ToolCall(f"call_{turn}", "Bash" if dialect == "anthropic" else "bash", {"command": command})
        return Message(role="assistant", tool_calls=(call,))

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def captured(profile: HarnessProfile) -> Captured:
    """Runs one harness to its end. Raises ConfigError when it is not installed, RuntimeError when it did not go through
    all probes."""
    check(profile)
    prefix = prefix_of(profile)
    answerer = type("Answerer", (_Answerer,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answerer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    access = SessionAccess(path="/capture", api_key="capture")
    url = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        launch = prepare(profile, prefix, instruction=JOB_MARK, access=access, proxy_url=url, home=home, window=WINDOW)
        for path, content in launch.files.items():
            Path(home, path).write_text(content)
        run = subprocess.run(
            [text.replace(SANDBOX_PREFIX, str(prefix)) for text in launch.argv],
            cwd=work,
            env={"HOME": home, "PATH": "/usr/local/bin:/usr/bin:/bin", **launch.env},
            input=launch.stdin,
            capture_output=True,
            text=True,
            timeout=180,
        )
    server.shutdown()
    server.server_close()
    if len(answerer.requests) != len(PROBES) + 1:
        raise RuntimeError(
            f"{profile.name}: {len(answerer.requests)} requests instead of {len(PROBES) + 1}, "
            f"exit code {run.returncode}: {(run.stdout + run.stderr)[-500:]}"
        )
    return Captured(harness=profile.name, requests=answerer.requests)


def main() -> None:
    runs = [captured(load_profile(name)) for name in HARNESSES]
    CAPTURED.parent.mkdir(parents=True, exist_ok=True)
    CAPTURED.write_bytes(msgspec.json.encode(runs))
    for run in runs:
        tools = ", ".join(tool.name for tool in run.requests[0].tools)
        print(f"{run.harness}: {len(run.requests)} requests, tools {tools}")
    print(f"Written to {CAPTURED}.")


if __name__ == "__main__":
    main()
