"""The registry of registered memory against a model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import GyreError, InvariantViolation
from gyre.transport.buffers import Buffers


class Engine:
    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def register_memory(self, address: int, length: int) -> int:
        self.registered[address] = length
        return self.code

    def unregister_memory(self, address: int) -> int:
        del self.registered[address]
        return self.code


Ranges = st.tuples(st.integers(0, 40), st.integers(1, 12))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["register", "unregister", "require"]), Ranges), max_size=12))
def test_only_whole_registered_ranges_are_transferred(actions):
    engine = Engine()
    buffers = Buffers(engine)
    owner: dict[int, int] = {}
    """The buffer that each byte belongs to."""
    for action, (address, length) in actions:
        span = range(address, address + length)
        if action == "register" and not any(byte in owner for byte in span):
            buffers.register(address, length)
            owner |= dict.fromkeys(span, address)
        elif action == "register":
            with pytest.raises(InvariantViolation, match="overlaps"):
                buffers.register(address, length)
        elif action == "unregister" and owner.get(address) == address:
            buffers.unregister(address)
            owner = {byte: start for byte, start in owner.items() if start != address}
        elif action == "unregister":
            with pytest.raises(InvariantViolation, match="not registered"):
                buffers.unregister(address)
        elif len({owner.get(byte) for byte in span}) == 1 and address in owner:
            buffers.require(address, length)
        else:
            with pytest.raises(InvariantViolation, match="outside"):
                buffers.require(address, length)
        assert set(engine.registered) == set(owner.values())


def test_a_refusal_of_the_engine_is_an_error_and_registers_nothing():
    buffers = Buffers(Engine(code=-1))
    with pytest.raises(GyreError, match="refused to register"):
        buffers.register(1, 2)
    with pytest.raises(InvariantViolation):
        buffers.require(1, 2)
