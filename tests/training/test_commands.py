"""The command stream of a cell carries micro-steps of any size."""

import os

from gyre.training.commands import PART, Command, CommandStream
from gyre.transport.rendezvous import StoreServer, connect_store


def test_commands_of_any_size_arrive_in_order_and_leave_nothing(store: StoreServer) -> None:
    client = connect_store(store.address, 10.0)
    leader, follower = (CommandStream(connect_store(store.address, 10.0), 5, 99) for _ in range(2))
    results = CommandStream(client, 5, 99)
    before = client.num_keys()
    for size in (0, 10, PART, 3 * PART):
        sent = Command(method="micro_step", arguments=os.urandom(size))
        number = leader.append(sent)
        assert follower.next() == (number, sent)
        follower.answer(number, b"done")
        assert results.wait_answer(number) == b"done"
    assert client.num_keys() == before
