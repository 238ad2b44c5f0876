"""Processes outlive the controller that asked for them, and the next one finds them by name. Real processes."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from launcher_contract import calling, spec

from gyre.core.errors import GyreError, KilledWhileStarting
from gyre.launch import LocalLauncher
from gyre.launch.base import parse_name
from gyre.launch.supervisor import LocalSupervisor, ProcessSupervisor, SupervisedLauncher
from gyre.rpc import connect, serve


@contextlib.asynccontextmanager
async def controller(parent: LocalLauncher) -> AsyncIterator[SupervisedLauncher]:
    """A new controller's launcher, over RPC; leaving it is the controller's death."""
    connection = connect(ProcessSupervisor, f"unix:{parent.scratch('')}/supervisor.sock", parent.secret)
    try:
        async with SupervisedLauncher(connection.stub, parent.secret, parent.host, str(parent.scratch(""))) as launcher:
            yield launcher
    finally:
        await connection.close()


@pytest.fixture
async def parent(tmp_path: Path) -> AsyncIterator[LocalLauncher]:
    async with LocalLauncher(tmp_path) as launcher:
        address = f"unix:{launcher.scratch('')}/supervisor.sock"
        server = await serve(LocalSupervisor(launcher), ProcessSupervisor, address, launcher.secret)
        yield launcher
        await server.stop()


async def test_the_next_controller_finds_what_runs_and_uses_no_name_twice(parent: LocalLauncher) -> None:
    async with controller(parent) as first:
        assert (first.found("engine-0"), first.next_number("engine-0")) == ([], 0)
        old = await first.start(spec("engine-0"))
        await first.start(spec("engine-1"))
        await old.stop(grace_s=0.0)
        newer = await first.start(spec("engine-0.1"))
        with pytest.raises(GyreError, match=r"process engine-0\.2 ended while starting"):
            await first.start(spec("engine-0.2", broken=True))
    async with controller(parent) as second:
        (found,) = second.found("engine-0")
        assert (found.spec.name, found.address) == ("engine-0.1", newer.address)
        assert second.next_number("engine-0") == 3
        assert second.next_number("engine-1") == 1
        async with calling(second, found) as echo:
            assert await echo.greet("you", 1) == "hello you"
            os.kill(await echo.pid(), signal.SIGKILL)
        assert await found.wait() == "killed by signal 9"
    async with controller(parent) as third:
        assert third.found("engine-0") == []


async def test_a_start_that_a_signal_ended_says_so(parent: LocalLauncher) -> None:
    async with controller(parent) as launcher:
        with pytest.raises(KilledWhileStarting, match="ended while starting \\(killed by signal 9\\)"):
            await launcher.start(spec("engine-0", killed=True))


@pytest.mark.parametrize(
    ("process", "parts"),
    [
        ("engine-1", ("engine-1", 0, "")),
        ("engine-1.12", ("engine-1", 12, "")),
        ("engine-1-sender", ("engine-1", 0, "-sender")),
        ("engine-1.2-sender", ("engine-1", 2, "-sender")),
        ("trainer-0-rank3", ("trainer-0", 0, "-rank3")),
        ("trainer-10.1-rank3", ("trainer-10", 1, "-rank3")),
        ("shim", ("shim", 0, "")),
        ("proxy-0.3", ("proxy-0", 3, "")),
    ],
)
def test_a_process_name_says_for_whom_the_how_manieth_and_which_part(process: str, parts: tuple) -> None:
    assert parse_name(process) == parts
