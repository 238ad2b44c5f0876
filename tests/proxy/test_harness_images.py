"""Images on the way to a policy that reads text only: the prompt says that one is missing; the path stays exact."""

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from harness_runs import CLAUDE, OPENCODE, Rules, call, chain, installed, leaves, run, shell

pytestmark = pytest.mark.harness

PROMPTS = {
    "claude_code": "[image omitted]",
    "claude_code_328": "[image omitted]",
    "codex": "[input_image omitted]",
    "opencode_messages": "[image omitted]",
    "opencode_responses": "[input_image omitted]",
    # These do not send images to a model that is not declared to see them.
    "opencode": "ERROR: Cannot read image (this model does not support image input).",
    "pi": "(tool image omitted: model does not support images)",
    "pi_messages": "(tool image omitted: model does not support images)",
    "pi_responses": "(tool image omitted: model does not support images)",
    "qwen_code": "This model does not support image input.",
}


def png() -> str:
    """An 8×8 grey picture, base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0".join([b""] + [b"\x80" * 8] * 8))
    parts = chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def look(name: str, path: Path) -> str:
    """A call of the harness's own tool for files or images."""
    if name in CLAUDE:
        return call("Read", file_path=str(path))
    if name == "codex":
        return call("view_image", path=str(path))
    if name == "qwen_code":
        return call("read_file", file_path=str(path))
    if name in OPENCODE:
        return call("read", filePath=str(path))
    return call("read", path=str(path))


@pytest.mark.parametrize("name", PROMPTS)
async def test_an_image_in_a_tool_result_is_a_visible_gap(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "workspace" / "a.png"
    rules: Rules = {
        "Do the steps.": shell(name, f"echo {png()} | base64 -d > a.png; printf 'made%s' -ok"),
        "made-ok": "Look.\n" + look(name, path),
        "": "I saw it.",
    }
    app = await run(proxy_tokenizer, installed(name), tmp_path, rules)
    assert path.is_file()
    assert PROMPTS[name] in app.script.prompts[-1].rpartition("Look.")[2]
    chain(app, app.sink.records)
    assert len(app.sink.records) == 3
    assert leaves(app) == {"main": 1}
