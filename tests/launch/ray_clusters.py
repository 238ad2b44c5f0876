"""Ray clusters for tests, in a network namespace of theirs: nodes have addresses of its loopback interface."""

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HEAD, SECOND = "10.77.0.1", "10.77.0.2"
PORT = 6379


@contextlib.contextmanager
def node(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`ray start`; its end takes the node with it."""
    argv = [
        *(sys.executable, "-u", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--object-store-memory", str(80 << 20), *arguments),
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise RuntimeError("".join(lines))
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


@contextlib.contextmanager
def cluster(*arguments: str) -> Iterator[tuple[str, Path]]:
    """One node: the address and the directory with Ray's logs."""
    # Short: Ray puts unix sockets in it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        where = [
            "--head",
            "--include-dashboard=false",
            f"--node-ip-address={HEAD}",
            f"--port={PORT}",
            f"--temp-dir={directory}",
        ]
        with node(*where, *arguments):
            yield f"{HEAD}:{PORT}", Path(directory)
