"""examples/policy/capture.py: how a harness presents a job, which the tiny policy was fitted to."""

import runpy
from pathlib import Path

import pytest

from gyre.core.errors import ConfigError
from gyre.harnesses import check, load_profile

CAPTURE = Path(__file__).parents[2] / "examples/policy/capture.py"


@pytest.mark.harness
def test_a_harness_is_captured_through_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile("claude_code")
    try:
        check(profile)
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.syspath_prepend(str(CAPTURE.parent))
    requests = runpy.run_path(str(CAPTURE))["captured"](profile).requests
    assert [tool.name for tool in requests[0].tools] == ["Bash", "Edit", "Read"]
    assert [message.role for message in requests[-1].messages].count("assistant") == 3
