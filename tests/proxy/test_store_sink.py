from pathlib import Path

import pytest

from gyre.core.errors import GyreError
from gyre.core.records import CallRecord, RoleClass
from gyre.proxy.dialects.base import TurnHead, Usage
from gyre.proxy.session.call import Asked
from gyre.proxy.session.log import LoggedCall
from gyre.proxy.session.services import StoreSink
from gyre.store import RunStore
from gyre.trajectory.history import TurnEntry
from gyre.trajectory.tree import TrajectoryTree


def record(execution_id: str, seq: int) -> CallRecord:
    return CallRecord(
        execution_id=execution_id, call_id=f"c{seq}", seq=seq, parent=f"c{seq - 1}" if seq else None,
        prefix_len=2 * seq, delta_ids=[1], output_ids=[2], output_logprobs=[-1.0], output_versions=[0],
        role=RoleClass.MAIN,
    )  # fmt: skip


async def put(sink: StoreSink, stored: CallRecord) -> None:
    head = TurnHead(id=stored.call_id, model="m", created=0, prompt_tokens=1)
    asked = Asked(key=b"k", question=b"q", role=RoleClass.MAIN)
    turn = TurnEntry(call_id=stored.call_id, seq=stored.seq)
    await sink.put(stored, LoggedCall(turn=turn, asked=asked, head=head, usage=Usage(prompt=1, output=1)))


async def test_nothing_is_stored_after_a_lost_record_that_may_continue_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path / "gyre.sqlite")
    sink = StoreSink(store)
    await put(sink, record("a", 0))
    with monkeypatch.context() as full_disk:
        full_disk.setattr(store, "put_record", _fail)
        with pytest.raises(OSError, match="full"):
            await put(sink, record("a", 1))
    with pytest.raises(GyreError, match="record of a could not be written"):
        await put(sink, record("a", 2))
    await put(sink, record("b", 0))
    assert len(TrajectoryTree.from_records(store.records("a"))) == 1
    assert len(store.records("b")) == 1
    sink.close()


def _fail(record: CallRecord) -> None:
    raise OSError("the disk is full")
