"""The profile is one that Gyre can start, and its agent runs what the policy asks for and ends when it says so."""

import os
import subprocess
import sys
from pathlib import Path

from gyre.harnesses import load_profile

PROFILE = Path(__file__).with_name("name_of_it.toml")
# Answers like a policy: one command, then no call.
STUB = """
from types import SimpleNamespace as N
calls = [N(id="1", function=N(name="bash", arguments='{"command": "echo done > made.txt"}'))]
answers = iter([N(tool_calls=calls, model_dump=lambda **_: {}), N(tool_calls=None, model_dump=lambda **_: {})])
OpenAI = lambda: N(chat=N(completions=N(create=lambda **_: N(choices=[N(message=next(answers))]))))
"""


def test_the_agent_runs_what_the_policy_asks_for(tmp_path: Path) -> None:
    profile = load_profile(str(PROFILE.absolute()))
    (tmp_path / "agent.py").write_text(profile.files["agent.py"].replace("$$", "$"))
    (tmp_path / "openai.py").write_text(STUB)
    subprocess.run(
        [sys.executable, "agent.py"],
        input="Write a file.",
        text=True,
        cwd=tmp_path,
        check=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    assert (tmp_path / "made.txt").read_text() == "done\n"
