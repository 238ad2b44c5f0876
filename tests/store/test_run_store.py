"""RunStore: typed round trips, append-only rules, several processes, kill -9, reading without a trace on disk."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.core.errors import ConfigError, GyreError, InvariantViolation
from gyre.core.events import GroupReady, LedgerSampled, RunStarted, StepDone
from gyre.core.records import Assessment, CallRecord, Outcome, RoleClass, Validity
from gyre.store import RunStore


def record(execution_id: str = "0-0", seq: int = 0, call_id: str | None = None, tokens: int = 3) -> CallRecord:
    return CallRecord(
        execution_id=execution_id,
        call_id=call_id or f"c{seq}",
        seq=seq,
        parent=None if seq == 0 else f"c{seq - 1}",
        prefix_len=0,
        delta_ids=list(range(tokens)),
        output_ids=list(range(tokens)),
        output_logprobs=[-1.0 / (t + 3) for t in range(tokens)],
        output_versions=[1] * tokens,
        role=RoleClass.MAIN,
        cells=[1, 0],
        drift={"whitespace": 1},
    )


def outcome(execution_id: str, reward: float = 0.5) -> Outcome:
    return Outcome(execution_id=execution_id, validity=Validity.VALID, reward=reward, cause="completed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gyre.sqlite"


EVENTS = [
    RunStarted(t=0.0, run_id="r"),
    LedgerSampled(t=1.5, d=4, p=2, f=1, capacity=8, ready=0, roles=["training", "rollout"]),
    GroupReady(t=2.0, group=3),
]


def test_events_come_back_typed_and_in_order(path: Path) -> None:
    with RunStore(path) as store:
        for event in EVENTS:
            store.append(event)
        assert list(store.events()) == EVENTS
    assert list(RunStore(path, read_only=True).events()) == EVENTS
    kinds = sqlite3.connect(path).execute("SELECT kind, t FROM events ORDER BY id").fetchall()
    assert kinds == [("run_started", 0.0), ("ledger", 1.5), ("group_ready", 2.0)]


def test_a_reader_asks_for_what_is_new(path: Path) -> None:
    with RunStore(path) as store:
        reader = RunStore(path, read_only=True)
        assert reader.events_after(0) == ([], 0)
        store.append(EVENTS[0])
        seen, row = reader.events_after(0)
        assert seen == EVENTS[:1]
        for event in EVENTS[1:]:
            store.append(event)
        assert reader.events_after(row)[0] == EVENTS[1:]
        assert reader.events_after(reader.events_after(row)[1])[0] == []
        store.put_record(record())
        assert (reader.record_count("0-0"), reader.record_count("0-1")) == (1, 0)


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0, allow_nan=False, allow_infinity=False)), max_size=20
    ),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_records_come_back_bit_for_bit(tmp_path: Path, tokens: list[tuple[int, float]], agent: str) -> None:
    stored = CallRecord(
        execution_id="x",
        call_id="c",
        seq=0,
        parent=None,
        prefix_len=0,
        delta_ids=[t for t, _ in tokens],
        output_ids=[t for t, _ in tokens],
        output_logprobs=[p for _, p in tokens],
        output_versions=[0] * len(tokens),
        role=RoleClass.SUB_AGENT,
        agent_id=agent,
    )
    path = tmp_path / "property.sqlite"
    path.unlink(missing_ok=True)
    with RunStore(path) as store:
        store.put_record(stored)
        assert store.records("x") == [stored]


def test_records_are_ordered_by_seq_and_written_once(path: Path) -> None:
    with RunStore(path) as store:
        for seq in (2, 0, 1):
            store.put_record(record(seq=seq))
        store.put_record(record("0-1"))
        assert [r.seq for r in store.records("0-0")] == [0, 1, 2]
        assert store.records("nobody") == []
        for again in (record(seq=1, call_id="other"), record(seq=9, call_id="c1")):
            with pytest.raises(InvariantViolation, match="already holds"):
                store.put_record(again)
        assert [r.call_id for r in store.records("0-0")] == ["c0", "c1", "c2"]


def test_assessments_never_overwrite_each_other(path: Path) -> None:
    def assessment(score: float) -> Assessment:
        return Assessment(execution_id="0-0", artifact="w@1", evaluator="tests", score=score, valid=True)

    with RunStore(path) as store:
        for score in (0.25, 0.5, 0.25):
            store.put_assessment(assessment(score))
        assert [a.score for a in store.assessments("0-0")] == [0.25, 0.5, 0.25]


def test_an_execution_has_one_outcome(path: Path) -> None:
    with RunStore(path) as store:
        store.put_outcome(outcome("0-1"))
        store.put_outcome(outcome("0-0", 0.0))
        store.put_outcome(outcome("0-1"))
        with pytest.raises(InvariantViolation):
            store.put_outcome(outcome("0-1", 1.0))
        assert store.outcomes() == {"0-1": outcome("0-1"), "0-0": outcome("0-0", 0.0)}
        assert store.outcome("0-1") == outcome("0-1")
        assert store.outcome("1-0") is None
        store.put_record(record("2-0"))
        assert store.execution_ids() == ["0-0", "0-1", "2-0"]


def test_threads_share_a_store(path: Path) -> None:
    with RunStore(path) as store:

        def put(execution: int) -> None:
            for seq in range(20):
                store.put_record(record(str(execution), seq))
                assert len(store.records(str(execution))) == seq + 1

        threads = [threading.Thread(target=put, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(store.records(str(n))) for n in range(4)] == [20] * 4


# -- processes ----------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from gyre.core.events import GroupReady
from gyre.store import RunStore
sys.stdin.readline()
store = RunStore(Path(sys.argv[1]))
number = 0
while number < int(sys.argv[2]):
    store.append(GroupReady(t=0.0, group=number))
    print(number, flush=True)
    number += 1
"""


def writer(path: Path, rows: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(rows)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_kill_9_loses_no_committed_row(path: Path) -> None:
    process = writer(path, 1_000_000)
    assert process.stdin
    assert process.stdout
    process.stdin.write("go\n")
    process.stdin.flush()
    reported = [int(process.stdout.readline()) for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    reported += [int(line) for line in process.stdout.read().splitlines()]
    process.wait()
    process.stdin.close()
    process.stdout.close()

    left = sorted(os.listdir(path.parent))
    assert "gyre.sqlite-wal" in left, "the test means to read a database whose log was not folded in"
    groups = [event.group for event in RunStore(path, read_only=True).events() if isinstance(event, GroupReady)]
    assert groups[: len(reported)] == reported
    assert len(groups) - len(reported) in (0, 1), "at most the row whose report the signal cut off"
    assert sorted(os.listdir(path.parent)) == left
    with RunStore(path) as store:
        store.append(GroupReady(t=0.0, group=-1))
        assert len(list(store.events())) == len(groups) + 1


def test_processes_create_and_write_one_database_together(path: Path) -> None:
    processes = [writer(path, 50) for _ in range(4)]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    with RunStore(path, read_only=True) as store:
        groups = [event.group for event in store.events() if isinstance(event, GroupReady)]
    assert sorted(groups) == sorted(list(range(50)) * 4)
    assert [name for name in os.listdir(path.parent) if not name.startswith("gyre.sqlite")] == []


# -- reading ------------------------------------------------------------------------------------------------------


def test_a_reader_follows_writers_that_come_and_go(path: Path) -> None:
    """The reader outlives the writer, sees every commit, and leaves the directory as it found it."""
    with RunStore(path) as first:
        first.append(EVENTS[0])
        reader = RunStore(path, read_only=True)
        assert len(list(reader.events())) == 1
        first.append(EVENTS[1])
        assert len(list(reader.events())) == 2
    assert len(list(reader.events())) == 2
    assert os.listdir(path.parent) == ["gyre.sqlite"]
    with RunStore(path) as second:
        second.append(EVENTS[2])
        assert len(list(reader.events())) == 3
        with pytest.raises(GyreError, match="read-only"):
            reader.append(EVENTS[0])
    reader.close()


def test_a_copy_without_the_shared_memory_file_is_read_completely(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    with RunStore(path) as store:
        for event in EVENTS:
            store.append(event)
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    before = sorted(os.listdir(copy.parent))
    assert list(RunStore(copy, read_only=True).events()) == EVENTS
    assert sorted(os.listdir(copy.parent)) == before == ["gyre.sqlite", "gyre.sqlite-wal"]


def test_bad_paths_are_one_sentence(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        RunStore(path, read_only=True)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="is not a directory"):
        RunStore(tmp_path / "missing" / "gyre.sqlite")
    path.write_text("not a database, but long enough to be read as one: " * 50)
    for read_only in (True, False):
        with pytest.raises(ConfigError, match="not a readable run database"):
            RunStore(path, read_only=read_only)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 7")
    other.close()
    with pytest.raises(ConfigError, match="schema 7"):
        RunStore(path)


def test_a_damaged_file_and_a_full_disk_are_one_sentence(path: Path) -> None:
    with RunStore(path) as store:
        store.append(EVENTS[0])
        assert store._writer is not None
        store._writer.execute("PRAGMA max_page_count = 1")
        with pytest.raises(GyreError, match=r"cannot be written .*disk is full"):
            store.append(RunStarted(t=0.0, run_id="r" * 100_000))
        assert list(store.events()) == EVENTS[:1]
    path.write_bytes(path.read_bytes()[:4096].ljust(40_000, b"\xff"))
    with pytest.raises(GyreError, match=r"cannot be read .*malformed"):
        list(RunStore(path, read_only=True).events())


def test_a_row_of_another_gyre_is_named(path: Path) -> None:
    with RunStore(path) as store:
        store.append(EVENTS[0])
    with sqlite3.connect(path) as raw:
        raw.execute("""INSERT INTO events (t, kind, payload) VALUES (1, 'new', '{"kind": "new", "t": 1}')""")
    raw.close()
    with pytest.raises(GyreError, match="cannot read"):
        list(RunStore(path, read_only=True).events())


def test_step_events_keep_their_floats(path: Path) -> None:
    step = StepDone(
        t=0.1,
        step=1,
        groups=[0],
        staleness=[0],
        reward_mean=1 / 3,
        loss=-1e-9,
        grad_norm=0.1 + 0.2,
        cells=[0, 1],
        logprob_gap_count=5,
        logprob_gap_mean=1e-7,
        logprob_gap_max=3e-7,
        clipped_executions=0,
        executions=2,
        targets=9,
        seconds=2.5,
    )
    with RunStore(path) as store:
        store.append(step)
        assert list(store.events()) == [step]
