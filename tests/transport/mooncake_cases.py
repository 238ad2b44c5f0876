"""The transport contract over Mooncake; `test_mooncake.py` runs this file in a network namespace."""

import numpy as np
import pytest
from transport_contract import RemoteContract

from gyre.core.errors import InvariantViolation
from gyre.transport.mooncake import MooncakeTransport


class TestMooncake(RemoteContract):
    kind = "mooncake"


def test_memory_that_is_not_registered_is_never_read_into(tmp_path):
    """Mooncake's TCP transport would do it."""
    transport = MooncakeTransport(str(tmp_path))
    memory = np.memmap(tmp_path / "m", dtype=np.uint8, mode="w+", shape=64)
    with pytest.raises(InvariantViolation, match="outside every registered buffer"):
        transport._read("127.0.0.1:1", 0, memory, 0)
