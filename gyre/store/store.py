"""The run database: journal, call records, assessments and outcomes in one SQLite file (docs/run-directory.md).

Several processes have it open: the controller appends events, proxy workers put records, runners put assessments and
outcomes, and any tool reads. Every `append` and `put_*` is one transaction: when it returns, the row survives kill -9.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from gyre.core.errors import GyreError, InvariantViolation
from gyre.core.events import Event
from gyre.core.records import Assessment, CallRecord, Outcome
from gyre.store.schema import open_for_reading, open_for_writing

T = TypeVar("T")

_EVENT = msgspec.json.Decoder(Event)
_RECORD = msgspec.msgpack.Decoder(CallRecord)
_ASSESSMENT = msgspec.json.Decoder(Assessment)
_OUTCOME = msgspec.json.Decoder(Outcome)


class RunStore:
    """Typed access to one `gyre.sqlite`. Calls are synchronous and short; threads of a process may share it.

    A read-only store creates no file and may be kept while the run writes or resumes: each call sees all that was
    committed before it. Raises ConfigError when the file is missing (read-only) or is not a run database. Every call
    raises GyreError when the file is damaged or cannot be written.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self._lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        if read_only:
            open_for_reading(path).close()
        else:
            self._writer = open_for_writing(path)

    # -- journal ----------------------------------------------------------------------------------------------------

    def append(self, event: Event) -> None:
        kind = type(event).__struct_config__.tag
        self._write(
            "INSERT INTO events (t, kind, payload) VALUES (?, ?, ?)",
            (event.t, kind, msgspec.json.encode(event).decode()),
        )

    def events(self) -> Iterator[Event]:
        """Every event, in the order of commit. A resumed run appends to the same journal: see `gyre.store.journal`."""
        for (payload,) in self._read("SELECT payload FROM events ORDER BY id"):
            yield self._decode(_EVENT, payload)

    def events_after(self, row: int) -> tuple[list[Event], int]:
        """What was committed after this row, and the row to ask after next time; 0 is before the first."""
        rows = self._read("SELECT id, payload FROM events WHERE id > ? ORDER BY id", (row,))
        return [self._decode(_EVENT, payload) for _, payload in rows], rows[-1][0] if rows else row

    # -- records ----------------------------------------------------------------------------------------------------

    def put_record(self, record: CallRecord) -> None:
        """Raises InvariantViolation when the execution already has a record of this seq or call id."""
        self._write(
            "INSERT INTO records (execution_id, seq, call_id, payload) VALUES (?, ?, ?, ?)",
            (record.execution_id, record.seq, record.call_id, msgspec.msgpack.encode(record)),
        )

    def records(self, execution_id: str) -> list[CallRecord]:
        """In commit order (by seq); empty when there is none."""
        rows = self._read("SELECT payload FROM records WHERE execution_id = ? ORDER BY seq", (execution_id,))
        return [self._decode(_RECORD, payload) for (payload,) in rows]

    def execution_ids(self) -> list[str]:
        """Executions with at least one record or an outcome, sorted."""
        rows = self._read("SELECT execution_id FROM records UNION SELECT execution_id FROM outcomes ORDER BY 1")
        return [execution_id for (execution_id,) in rows]

    def record_count(self, execution_id: str) -> int:
        """Without reading the records."""
        return int(self._read("SELECT COUNT(*) FROM records WHERE execution_id = ?", (execution_id,))[0][0])

    # -- assessments and outcomes -----------------------------------------------------------------------------------

    def put_assessment(self, assessment: Assessment) -> None:
        """Appends; assessments never overwrite each other."""
        self._write(
            "INSERT INTO assessments (execution_id, payload) VALUES (?, ?)",
            (assessment.execution_id, msgspec.json.encode(assessment).decode()),
        )

    def assessments(self, execution_id: str) -> list[Assessment]:
        """In the order they were put."""
        rows = self._read("SELECT payload FROM assessments WHERE execution_id = ? ORDER BY id", (execution_id,))
        return [self._decode(_ASSESSMENT, payload) for (payload,) in rows]

    def put_outcome(self, outcome: Outcome) -> None:
        """An execution has one outcome. Putting an equal one again is ignored (a report may be repeated after a crash);
        another one raises InvariantViolation."""
        if self.outcome(outcome.execution_id) == outcome:
            return
        self._write(
            "INSERT INTO outcomes (execution_id, payload) VALUES (?, ?)",
            (outcome.execution_id, msgspec.json.encode(outcome).decode()),
        )

    def outcome(self, execution_id: str) -> Outcome | None:
        rows = self._read("SELECT payload FROM outcomes WHERE execution_id = ?", (execution_id,))
        return self._decode(_OUTCOME, rows[0][0]) if rows else None

    def outcomes(self) -> dict[str, Outcome]:
        """By execution id, in the order they were put."""
        rows = self._read("SELECT execution_id, payload FROM outcomes ORDER BY rowid")
        return {execution_id: self._decode(_OUTCOME, payload) for execution_id, payload in rows}

    # -- connection -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._writer is not None:
            with self._lock:
                self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        if self._writer is None:
            raise GyreError(f"{self.path} was opened read-only: open it for writing to change it.")
        with self._lock:
            try:
                self._writer.execute(statement, values)
            except sqlite3.IntegrityError as error:
                raise InvariantViolation(
                    f"{self.path} already holds this row ({error}); it is written once."
                ) from error
            except sqlite3.Error as error:
                raise GyreError(f"{self.path} cannot be written ({error}): see to its disk, then resume.") from error

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._connection() as connection:
            try:
                return connection.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise GyreError(f"{self.path} cannot be read ({error}): use a copy made before.") from error

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if self._writer is not None:
            with self._lock:
                yield self._writer
            return
        connection = open_for_reading(self.path)
        try:
            yield connection
        finally:
            connection.close()

    def _decode(self, decoder: "msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]", payload: Any) -> T:
        try:
            return decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise GyreError(
                f"{self.path} holds a row that this Gyre cannot read ({error}); use the one that wrote it."
            ) from error
