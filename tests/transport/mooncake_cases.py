"""The transport contract over Mooncake; `test_mooncake.py` runs this file in a network namespace."""

import itertools
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transport_contract import RemoteContract, little_room, same
from weight_publisher import weights

from gyre.core.errors import InvariantViolation, PeerLost, WeightsUnavailable
from gyre.transport.mooncake import MooncakeTransport
from gyre.transport.section import MooncakeSection


class TestMooncake(RemoteContract):
    kind = "mooncake"

    def test_memory_of_a_pull_goes_with_its_tensors(self, publisher, reader):
        def held() -> int:
            return Path("/proc/self/maps").read_text().count("memfd:gyre-v77 ")

        pulled = reader.pull(publisher.publish(77))
        assert held() > 0
        del pulled
        assert held() == 0
        assert list(reader._local.root.iterdir()) == []

    def test_no_room_for_a_copy_is_said_before_any_byte_comes(self, publisher, reader, tmp_path):
        with little_room(), pytest.raises(WeightsUnavailable, match="no room for version 1"):
            reader.fetch(publisher.publish(1, size=1_000_000), tmp_path / "copy")
        assert list(tmp_path.glob("copy")) == []

    def test_a_publisher_that_hangs_during_a_pull_is_lost_within_two_seconds(self, publisher, reader, monkeypatch):
        ref, small = publisher.publish(1, size=1_000_000), publisher.publish(2)
        read, begun, stopped_at = reader._engine.transfer_sync_read, itertools.count(1), []

        def stop_at_the_third(*piece: object) -> int:
            if next(begun) == 3:
                publisher.process.send_signal(signal.SIGSTOP)
                stopped_at.append(time.monotonic())
            return read(*piece)

        monkeypatch.setattr(reader, "_engine", SimpleNamespace(transfer_sync_read=stop_at_the_third))
        with pytest.raises(PeerLost, match="delivered nothing"):
            reader.pull(ref)
        assert time.monotonic() - stopped_at[0] < 2.0
        # When it goes on, so does the reader.
        publisher.process.send_signal(signal.SIGCONT)
        assert same(reader.pull(small), weights(2))


def test_memory_that_is_not_registered_is_never_read_into(tmp_path):
    """Mooncake's TCP transport would do it."""
    transport = MooncakeTransport(str(tmp_path), "127.0.0.1", MooncakeSection())
    memory = np.memmap(tmp_path / "m", dtype=np.uint8, mode="w+", shape=64)
    with pytest.raises(InvariantViolation, match="outside every registered buffer"):
        transport._read("127.0.0.1:1", 0, memory, 0)
