"""Two MCP servers with a tool of the same name, through Codex, which declares them as namespaces."""

import sys
from pathlib import Path
from typing import Any

import pytest
from harness_runs import call, chain, installed, run

from gyre.harnesses import load_profile

pytestmark = pytest.mark.harness

SERVER = """
import json, sys
name = sys.argv[1]
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": name, "version": "1"}}
    elif asked.get("method") == "tools/list":
        schema = {"type": "object", "properties": {"q": {"type": "string"}}}
        result = {"tools": [{"name": "search", "description": "Searches " + name, "inputSchema": schema}]}
    elif asked.get("method") == "tools/call":
        result = {"content": [{"type": "text", "text": name + " found " + asked["params"]["arguments"]["q"]}]}
    else:
        result = {}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_each_server_s_tool_is_callable_and_routed_to_its_own(proxy_tokenizer: Any, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    files = load_profile("codex").files
    servers = "".join(
        f'\n[mcp_servers.{name}]\ncommand = "{sys.executable}"\nargs = ["{script}", "{name}"]\n'
        'default_tools_approval_mode = "approve"\n'
        for name in ("alpha", "beta")
    )
    profile = installed("codex", files={path: text + servers for path, text in files.items()})
    rules = {
        "beta found B": "Done.",
        "alpha found A": call("mcp__beta__search", q="B"),
        "Do the steps.": call("mcp__alpha__search", q="A"),
    }
    app = await run(proxy_tokenizer, profile, tmp_path, rules)
    chain(app, app.sink.records)
    assert len(app.sink.records) == 3
    assert [record.drift for record in app.sink.records] == [{}] * 3
