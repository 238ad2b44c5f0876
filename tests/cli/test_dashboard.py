"""`gyre dashboard` as a process, and what it refuses before it serves."""

import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from synthetic_journal import journal

from gyre.cli.main import main
from gyre.store import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run", "")
    with run.open_store() as store:
        for event in journal(2):
            store.append(event)
    return run


def test_it_serves_until_it_is_interrupted(run: RunDir) -> None:
    command = [sys.executable, "-m", "gyre.cli.main", "dashboard", str(run.root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.split(": ")[1].strip()
            assert address.startswith("http://127.0.0.1:")
            with httpx.Client(base_url=address, timeout=60) as client:
                assert "overview · run" in client.get("/").text
                assert "gyre_step 2.0" in client.get("/metrics").text
                assert client.get("/charts/timeline.svg").headers["content-type"] == "image/svg+xml"
                assert "server" not in client.get("/style.css").headers
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert (out, error) == ("", "")


def test_bad_input_is_one_sentence(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main(["dashboard", *arguments]) == 2
        return capsys.readouterr().err

    assert "does not exist" in refused(str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--host 127.0.0.1 --port {port} cannot be served on" in refused(str(run.root), "--port", port)
    assert "--port 70000 is no port" in refused(str(run.root), "--port", "70000")
    assert "cannot be served on" in refused(str(run.root), "--host", "no.such.name.invalid")
    connection = sqlite3.connect(run.database)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    assert "has schema 2 and this Gyre reads schema 1" in refused(str(run.root))
