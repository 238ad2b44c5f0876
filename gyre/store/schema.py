"""Tables of `gyre.sqlite` and how a connection to it is opened.

Writers use WAL with `synchronous=NORMAL`: a committed row survives kill -9 of any process, not a power cut. Readers
never create a file, so a run can be read from a read-only mount, after a crash, or while it writes.
"""

import os
import shutil
import sqlite3
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from gyre.core.errors import ConfigError

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 10.0

_TABLES = """
CREATE TABLE events (id INTEGER PRIMARY KEY, t REAL NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL);
CREATE TABLE records (
  id INTEGER PRIMARY KEY, execution_id TEXT NOT NULL, seq INTEGER NOT NULL, call_id TEXT NOT NULL,
  payload BLOB NOT NULL, UNIQUE (execution_id, seq), UNIQUE (execution_id, call_id));
CREATE TABLE assessments (id INTEGER PRIMARY KEY, execution_id TEXT NOT NULL, payload TEXT NOT NULL);
CREATE INDEX assessments_of ON assessments (execution_id);
CREATE TABLE outcomes (execution_id TEXT PRIMARY KEY, payload TEXT NOT NULL);
"""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Opens the database at `path`, creating it when missing; several processes may do so at once.

    Raises ConfigError when the directory is missing or the file is not a run database of this schema."""
    if not path.exists():
        _create(path)
    return _checked(path, sqlite3.connect(path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False))


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that neither writes nor creates a file; meant for one short read.

    SQLite would create `-wal` and `-shm` to read a WAL database that nobody has open. So: with both files there, an
    ordinary read-only connection; with neither, the file is complete and is read as immutable; with `-wal` alone (a
    writer is just closing, or the directory was copied without `-shm`), a copy in memory is read.

    Raises ConfigError when there is no run database at `path`."""
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: {path.parent} is not a run directory; pass one made by `gyre train`."
        )
    wal = path.with_name(path.name + "-wal").exists()
    shm = path.with_name(path.name + "-shm").exists()
    if wal and not shm:
        return _checked(path, _in_memory_copy(path))
    uri = f"file:{quote(str(path.absolute()))}?" + ("mode=ro" if wal else "immutable=1")
    return _checked(path, sqlite3.connect(uri, BUSY_TIMEOUT_S, uri=True, isolation_level=None, check_same_thread=False))


def _create(path: Path) -> None:
    """Builds the empty database aside and links it into place: SQLite does not wait for the lock that the switch to WAL
    needs, so processes that open a new file together would otherwise fail with "database is locked"."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory: create the run directory before its database.")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-database-") as aside:
        fresh = Path(aside) / path.name
        connection = sqlite3.connect(fresh)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"{_TABLES} PRAGMA user_version = {SCHEMA_VERSION};")
        connection.close()
        with suppress(FileExistsError):  # another process was first; its database is the same
            os.link(fresh, path)


def _in_memory_copy(path: Path) -> sqlite3.Connection:
    with tempfile.TemporaryDirectory(prefix="gyre-read-") as aside:
        copy = Path(aside) / path.name
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):  # the closing writer has just removed the log
                shutil.copyfile(path.with_name(path.name + suffix), copy.with_name(path.name + suffix))
        source = sqlite3.connect(copy)
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        source.backup(memory)
        source.close()
    return memory


def _checked(path: Path, connection: sqlite3.Connection) -> sqlite3.Connection:
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ConfigError(f"{path} is not a readable run database ({error}); pass another run directory.") from error
    if version != SCHEMA_VERSION:
        connection.close()
        raise ConfigError(
            f"{path} has schema {version} and this Gyre reads schema {SCHEMA_VERSION}: use the Gyre that wrote it."
        )
    return connection
