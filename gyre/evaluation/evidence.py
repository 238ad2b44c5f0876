"""What a judge reads: the files that an execution changed, as text, bounded. The host reads them as hostile content:
links are not followed, FIFOs are not opened, what is no text is only named."""

import filecmp
import os
import stat
from pathlib import Path

MOST_FILES = 2_000
"""Entries that are looked at."""


def changed_files(workspace: Path, start: Path | None, most_bytes: int) -> list[dict[str, str]]:
    """Path and content (or what it is instead) of every file that the start state lacks or has otherwise, by path,
    until `most_bytes` are used; then the content is cut, the rest only named, and after as many bytes again left out.
    """
    found: list[dict[str, str]] = []
    left = most_bytes
    for path in _walk(workspace):
        name = path.relative_to(workspace)
        if start is not None and _same(path, start / name):
            continue
        content = _text(path, left)
        shown = "not shown" if content is None else content
        entry = {"path": os.fsencode(name).decode(errors="replace"), "content": shown}
        left -= sum(len(text.encode(errors="replace")) for text in entry.values())
        found.append(entry)
        if left <= -most_bytes:
            found.append({"path": "", "content": "what else changed is not listed"})
            break
    return found


def _walk(root: Path) -> list[Path]:
    files: list[Path] = []
    pending = [root]
    while pending and len(files) < MOST_FILES:
        directory = pending.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            else:
                files.append(Path(entry.path))
    return sorted(files[:MOST_FILES])


def _same(path: Path, other: Path) -> bool:
    """Whether both are regular files of the same content."""
    try:
        if not (stat.S_ISREG(os.lstat(path).st_mode) and stat.S_ISREG(os.lstat(other).st_mode)):
            return False
        return filecmp.cmp(path, other, shallow=False)
    except OSError:
        return False


def _text(path: Path, most: int) -> str | None:
    """None for what is no text file, cannot be read, or does not fit at all."""
    if most <= 0:
        return None
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read(most + 1)
    except OSError:
        return None
    if b"\0" in data:
        return None
    text = data[:most].decode(errors="replace")
    return f"{text}\n[cut]" if len(data) > most else text
