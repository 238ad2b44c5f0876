"""The command stream of a cell carries micro-steps of any size."""

import os

from gyre.training.commands import PART, Command, CommandStream
from gyre.transport.rendezvous import StoreServer, connect_store


def test_commands_of_any_size_arrive_in_order_and_leave_nothing_whether_answered_or_not(store: StoreServer) -> None:
    client = connect_store(store.address, 10.0)
    leader, *followers = (CommandStream(connect_store(store.address, 10.0), 5, 99, 2) for _ in range(3))
    results = CommandStream(client, 5, 99, 2)
    before = client.num_keys()
    for size in (0, 10, PART, 3 * PART):
        sent = Command(method="micro_step", arguments=os.urandom(size))
        number = leader.append(sent)
        assert [follower.next() for follower in followers] == [(number, sent)] * 2
        if size:
            followers[1].answer(number, b"done")
            assert results.wait_answer(number) == b"done"
        assert client.num_keys() == before
