"""Every harness inside a sandbox, with its installation read-only and the proxy's socket as its only way out."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness_runs import EVERY, chain, installed, leaves, proxy_for
from test_harness_loops import steps

from gyre.core.system.paths import HOME
from gyre.harnesses import ContextWindow, prefix_of, prepare
from gyre.sandboxes import PROXY_URL, BubblewrapProvider, Mount, SandboxSpec

pytestmark = pytest.mark.harness


@pytest.fixture
def unix() -> Iterator[Path]:
    """A socket path that is short enough for Linux."""
    with tempfile.TemporaryDirectory(prefix="gyre-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "proxy"


@pytest.mark.parametrize("name", EVERY)
async def test_tool_loop_in_a_sandbox(proxy_tokenizer: Any, tmp_path: Path, unix: Path, name: str) -> None:
    profile = installed(name)
    async with proxy_for(proxy_tokenizer, profile, steps(name), unix=unix) as app:
        launch = prepare(
            profile,
            prefix_of(profile),
            instruction="Do the steps.",
            access=app.access,
            proxy_url=PROXY_URL,
            home=HOME,
            window=ContextWindow(max_context=app.bounds.max_context, max_output=app.bounds.max_new_tokens),
        )
        mounts = [Mount(source=source, target=target) for target, source in launch.mounts.items()]
        spec = SandboxSpec(name=name, root=tmp_path / "box", env=launch.env, mounts=mounts, proxy_socket=unix)
        sandbox = BubblewrapProvider().create(spec)
        try:
            await sandbox.start()
            for path, text in launch.files.items():
                await sandbox.write(f"{HOME}/{path}", text)
            (tmp_path / "prompt").write_text(launch.stdin)
            result = await sandbox.exec(
                launch.argv,
                stdin=tmp_path / "prompt",
                stdout=tmp_path / "out",
                stderr=tmp_path / "err",
                timeout_s=180,
                boot_timeout_s=profile.start_timeout_s,
            )
        finally:
            await sandbox.close(keep=True)
    shown = (tmp_path / "out").read_text()[-1500:] + (tmp_path / "err").read_text()[-1500:]
    assert result.exit_code == 0, shown
    assert (spec.workspace / "two.txt").read_text() == "two-ok"
    chain(app, app.sink.records)
    assert leaves(app) == {"main": 1}
