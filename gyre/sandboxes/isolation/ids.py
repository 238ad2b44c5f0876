"""The host ids of sandboxes that root starts: a range that nobody else on this machine has.

Inside, ids count from 0. Host uid 0 is not among them, so nothing inside owns a file of the kernel's or of the host's:
not /proc/sys, not /usr.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from gyre.core.errors import ConfigError

FIRST, COUNT = 2_000_000_000, 65_536
ROOT, AGENT, GRADER = 0, 1000, 1001
"""Ids inside: of an image's root, of the harness and what it starts, of a grader."""
LEAST = 2_000
"""A machine that maps fewer ids to us (a container) can still map these."""


class IdRange(msgspec.Struct, frozen=True):
    """`count` consecutive host ids; inside, the first of them is 0."""

    first: int
    count: int = COUNT

    def host(self, inside: int) -> int:
        """The host's id of an id inside. Raises ValueError when the range does not have it."""
        if not 0 <= inside < self.count:
            raise ValueError(f"id {inside} is outside a range of {self.count}")
        return self.first + inside

    def overlaps(self, other: "IdRange") -> bool:
        return self.first < other.first + other.count and other.first < self.first + self.count


def choose(used: Sequence[IdRange], mapped: Sequence[IdRange], first: int | None = None) -> IdRange:
    """A range within `mapped` that overlaps none of `used`: the configured one, or the first from FIRST on, or the
    largest there is. Raises ConfigError when the configured one is not free, or none has LEAST ids."""
    if first is not None:
        wanted = IdRange(first)
        taken = next((other for other in used if wanted.overlaps(other)), None)
        if taken is not None:
            raise ConfigError(
                f"sandbox.first_id = {first}: this machine uses the ids from {taken.first} on; "
                "choose 65,536 ids that no user, group or subordinate range has"
            )
        if not any(gap.first <= first and first + COUNT <= gap.first + gap.count for gap in mapped):
            raise ConfigError(f"sandbox.first_id = {first}: 65,536 ids from there on are not mapped in this container")
        return wanted
    gaps = [gap for have in mapped for gap in _gaps(have, used)]
    for gap in gaps:
        start = max(gap.first, FIRST)
        if gap.first + gap.count - start >= COUNT:
            return IdRange(start)
    largest = max(gaps, key=lambda gap: gap.count, default=IdRange(0, 0))
    if largest.count < LEAST:
        raise ConfigError(
            f"sandboxes need {LEAST} host ids that nobody uses, and the largest free range has {largest.count}; "
            "start the container with a larger range of ids"
        )
    return IdRange(largest.first, min(largest.count, COUNT))


def of_this_machine(first: int | None = None, root: Path = Path("/")) -> IdRange:
    """The range for this machine's sandboxes. Raises ConfigError."""
    used: list[IdRange] = [IdRange(0, 1)]
    for name, column in (("passwd", 2), ("group", 2)):
        used += [IdRange(int(row[column]), 1) for row in _rows(root / "etc" / name) if _is_number(row, column)]
    for name in ("subuid", "subgid"):
        for row in _rows(root / "etc" / name):
            if _is_number(row, 1) and _is_number(row, 2) and int(row[2]):
                used.append(IdRange(int(row[1]), int(row[2])))
    uids, gids = (_mapped(root / "proc/self" / name) for name in ("uid_map", "gid_map"))
    return choose(used, [both for uid in uids for both in _within(uid, gids)], first)


def _gaps(have: IdRange, used: Iterable[IdRange]) -> list[IdRange]:
    gaps, start, end = [], have.first, have.first + have.count
    for other in sorted(used, key=lambda other: other.first):
        if other.first >= end:
            break
        if other.first > start:
            gaps.append(IdRange(start, other.first - start))
        start = max(start, other.first + other.count)
    if start < end:
        gaps.append(IdRange(start, end - start))
    return gaps


def _within(have: IdRange, others: Iterable[IdRange]) -> list[IdRange]:
    found = []
    for other in others:
        start, end = max(have.first, other.first), min(have.first + have.count, other.first + other.count)
        if start < end:
            found.append(IdRange(start, end - start))
    return found


def _mapped(path: Path) -> list[IdRange]:
    return [IdRange(int(inside), int(count)) for inside, _, count in map(str.split, path.read_text().splitlines())]


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split(":") for line in path.read_text(errors="replace").splitlines()]
    except FileNotFoundError:
        return []


def _is_number(row: list[str], column: int) -> bool:
    return len(row) > column and row[column].isdecimal()
