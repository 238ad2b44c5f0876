"""Harness profiles: data that is checked, filled in and compared with what is installed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import ConfigError
from gyre.core.records import SessionAccess
from gyre.harnesses import (
    ContextWindow,
    HarnessLaunch,
    HarnessProfile,
    check,
    load_profile,
    prefix_of,
    prepare,
    profile_names,
)
from gyre.harnesses.profile import read_profile

ACCESS = SessionAccess(path="/x/abc", api_key="key")
WINDOW = ContextWindow(max_context=131_072, max_output=8192)

A_DAY = "86400000"
PATIENCE = {
    "claude_code": ["CLAUDE_STREAM_IDLE_TIMEOUT_MS", "API_TIMEOUT_MS"],
    "codex": ["stream_idle_timeout_ms"],
    "qwen_code": ['"timeout"'],
    "opencode": ["headerTimeout", "chunkTimeout"],
    "pi": ["timeoutMs"],
    "mini_swe_agent": ["timeout: 86400"],
}
"""Harness → settings of every limit of its own on a silent call (docs/harnesses.md)."""

MINIMAL = """
dialect = "chat"
binary = "${prefix}/run"
version_command = ["${prefix}/run", "--version"]
argv = ["${prefix}/run", "${instruction}"]
[install]
source = "npm"
package = "p"
version = "1.2"
"""


def write_profile(directory: Path, text: str) -> Path:
    path = directory / "mine.toml"
    path.write_text(text)
    return path


def launched(
    profile: HarnessProfile | str, prefix: Path, instruction: str, window: ContextWindow = WINDOW
) -> HarnessLaunch:
    profile = load_profile(profile) if isinstance(profile, str) else profile
    return prepare(
        profile, prefix, instruction=instruction, access=ACCESS, proxy_url="http://p", home="/h", window=window
    )


def test_the_shipped_profiles_load() -> None:
    assert {"claude_code", "mini_swe_agent"} <= set(profile_names())
    for name in profile_names():
        assert load_profile(name).name == name


def test_claude_code_starts_natively_with_the_session_of_its_execution(tmp_path: Path) -> None:
    launch = launched("claude_code", tmp_path, "Do $HOME.")
    assert launch.argv[0].startswith("/opt/harness/")
    assert (launch.env["ANTHROPIC_BASE_URL"], launch.env["ANTHROPIC_API_KEY"]) == ("http://p/x/abc", "key")
    assert launch.stdin == "Do $HOME."
    assert launch.mounts == {"/opt/harness": tmp_path}


def test_mini_swe_agent_reads_the_task_from_a_file_and_sees_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /somewhere/python/bin\nversion = 3.11\n")
    launch = launched("mini_swe_agent", tmp_path, 'a "b"\n😀')
    assert launch.files["task.yaml"] == 'run: {task: "a \\"b\\"\\n😀"}\n'
    assert launch.env["OPENAI_API_BASE"] == "http://p/x/abc/v1"
    assert launch.mounts["/somewhere/python"] == Path("/somewhere/python")


def test_an_argument_that_linux_refuses_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="128 KiB"):
        launched(read_profile(write_profile(tmp_path, MINIMAL)), tmp_path, "x" * (1 << 17))


def test_the_window_of_the_policy_reaches_every_harness_that_compacts(tmp_path: Path) -> None:
    for name in profile_names():
        launch = launched(name, tmp_path, "Do.")
        told = any("131072" in text for text in [*launch.env.values(), *launch.files.values()])
        assert told == (name != "mini_swe_agent"), name
    tiny = ContextWindow(max_context=2048, max_output=96)
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in launched("claude_code", tmp_path, "Do.", tiny).env


@given(st.integers(2, 2**20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_room_is_left_when_a_harness_compacts(sizes: tuple[int, int]) -> None:
    max_context, max_output = sizes
    values = ContextWindow(max_context=max_context, max_output=max_output).variables()
    assert 0 <= int(values["compact_at"]) <= max_context - max_output
    assert int(values["compact_at"]) + int(values["compact_reserve"]) == max_context
    assert int(values["compact_keep"]) <= max_context / 8


def test_an_unknown_harness_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="'nope' is unknown; there are claude_code"):
        load_profile("nope")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("argv =", "arguments ="), "arguments"),
        (("${instruction}", "${task}"), "argv: task is unknown"),
        (("${instruction}", "costs $1"), "argv: a stray"),
        (('"chat"', '"smoke signals"'), "dialect"),
        (('binary = "${prefix}/run"', 'binary = "${api_key}"'), "binary: api_key is unknown"),
        (("[install]", '[files]\n"/etc/cron.d/x" = ""\n[install]'), "files: /etc/cron.d/x is not below HOME"),
        (("[install]", '[files]\n"../x" = ""\n[install]'), r"files: \.\./x is not below HOME"),
        (('argv = ["${prefix}/run", "${instruction}"]', "argv = []"), "argv: expected `array` of length >= 1"),
    ],
)
def test_a_broken_profile_names_file_and_key(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    path = write_profile(tmp_path, MINIMAL.replace(*change))
    with pytest.raises(ConfigError, match=why) as raised:
        read_profile(path)
    assert str(path) in str(raised.value)


def test_a_profile_of_your_own_is_named_by_its_path(tmp_path: Path) -> None:
    path = write_profile(tmp_path, MINIMAL)
    assert load_profile(str(path)) == read_profile(path)
    with pytest.raises(ConfigError, match="no such profile"):
        load_profile(str(tmp_path / "nope.toml"))
    with pytest.raises(ConfigError, match="absolute path"):
        load_profile("mine.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.toml: cannot be read"):
        load_profile(str(tmp_path / "folder.toml"))


def test_a_variant_changes_keys_and_shares_the_installation(tmp_path: Path) -> None:
    write_profile(tmp_path, MINIMAL + '[env]\nKEEP = "1"\nCHANGE = "1"\n')
    (tmp_path / "other.toml").write_text('variant_of = "mine"\ndialect = "responses"\n[env]\nCHANGE = "2"\n')
    profile = read_profile(tmp_path / "other.toml")
    assert (profile.name, profile.dialect, profile.env) == ("other", "responses", {"KEEP": "1", "CHANGE": "2"})
    assert prefix_of(profile, tmp_path) == tmp_path / "mine-1.2"
    (tmp_path / "lost.toml").write_text('variant_of = "nope"\n')
    with pytest.raises(ConfigError, match="no such profile"):
        read_profile(tmp_path / "lost.toml")


def test_check_tells_missing_from_another_version(tmp_path: Path) -> None:
    profile = read_profile(write_profile(tmp_path, MINIMAL))
    with pytest.raises(ConfigError, match=r"mine 1\.2 is not installed .*run: gyre setup /path/of/mine.toml"):
        check(profile, tmp_path)
    binary = prefix_of(profile, tmp_path) / "run"
    binary.parent.mkdir()
    binary.write_text('#!/bin/sh\necho 1.20 "$SECRET"\n')
    binary.chmod(0o755)
    with pytest.raises(ConfigError, match=r"not version 1\.2 \(it says: 1\.20\)"):
        check(profile, tmp_path)
    binary.write_text("#!/bin/sh\necho 'mine 1.2'\n")
    check(profile, tmp_path)
    binary.write_text("#!/no/such/interpreter\n")
    with pytest.raises(ConfigError, match="does not start"):
        check(profile, tmp_path)


@pytest.mark.parametrize("name", profile_names())
def test_every_limit_of_a_harness_on_a_silent_call_is_a_day(name: str) -> None:
    profile = load_profile(name)
    told = "\n".join([*(f"{key}={value}" for key, value in profile.env.items()), *profile.files.values()])
    for setting in PATIENCE[profile.variant_of or name]:
        (line,) = [line for line in told.splitlines() if setting in line]
        assert A_DAY in line or "86400" in line
