"""Which trajectories of an execution train, and on which tokens (paper §5.3).

Draw one trajectory at a time: the highest role class that still has a leaf with unmasked targets; in it one leaf with
probability proportional to its unmasked targets. These targets are then frozen for that trajectory and its whole
root-to-leaf path is masked, so no token is a target twice.
"""

import random

import msgspec

from gyre.core.records import ROLE_PRIORITY, RoleClass
from gyre.trajectory.call import PathStep
from gyre.trajectory.tree import TrajectoryTree


class TargetSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens [start, stop) of one call."""

    call_id: str
    start: int
    stop: int


class AdmittedPath(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted trajectory with its frozen targets."""

    leaf_call_id: str
    role: RoleClass
    """Role class of the leaf, which decided its priority."""
    targets: list[TargetSpan]
    """Root first; disjoint from those of every other admitted path."""

    @property
    def target_count(self) -> int:
        """L_r."""
        return sum(span.stop - span.start for span in self.targets)


def admit(tree: TrajectoryTree, *, j_max: int | None, seed: int) -> list[AdmittedPath]:
    """Admitted trajectories in draw order, at most `j_max` (None: until no unmasked target remains).

    Only outputs of eligible records are targets: sampled by the policy, not orphaned, not auxiliary. Equal trees and
    seeds give equal results. An execution without targets gives []."""
    draw = random.Random(seed)
    mask = _Mask(tree)
    admitted: list[AdmittedPath] = []
    while j_max is None or len(admitted) < j_max:
        leaf = _draw(mask, draw)
        if leaf is None:
            break
        admitted.append(mask.freeze(leaf))
    return admitted


def _draw(mask: "_Mask", draw: random.Random) -> int | None:
    for role in ROLE_PRIORITY:
        candidates = [leaf for leaf in mask.by_role.get(role, []) if mask.unmasked[leaf] > 0]
        if candidates:
            ticket = draw.randrange(sum(mask.unmasked[leaf] for leaf in candidates))
            for leaf in candidates:
                ticket -= mask.unmasked[leaf]
                if ticket < 0:
                    return leaf
    return None


class _Mask:
    """Unmasked targets per leaf. Paths cover a prefix of a call's output, so one number per call is the whole mask."""

    def __init__(self, tree: TrajectoryTree) -> None:
        self._leaves = [node for node in tree.leaves() if node.eligible]
        self._paths: list[list[PathStep]] = []
        self._masked: dict[str, int] = {}
        self._leaves_over: dict[str, list[tuple[int, int]]] = {}
        """Call → (leaf, output tokens of the call on the leaf's path)."""
        self.unmasked: list[int] = []
        self.by_role: dict[RoleClass, list[int]] = {}
        for index, leaf in enumerate(self._leaves):
            steps = [step for step in tree.path_steps(leaf.call_id) if tree.node(step.call_id).eligible]
            self._paths.append(steps)
            self.unmasked.append(sum(step.covered for step in steps))
            self.by_role.setdefault(leaf.record.role, []).append(index)
            for step in steps:
                self._leaves_over.setdefault(step.call_id, []).append((index, step.covered))

    def freeze(self, leaf: int) -> AdmittedPath:
        """Takes the leaf's unmasked targets and masks its path."""
        targets = []
        for step in self._paths[leaf]:
            masked = self._masked.get(step.call_id, 0)
            if step.covered > masked:
                targets.append(TargetSpan(call_id=step.call_id, start=masked, stop=step.covered))
                self._masked[step.call_id] = step.covered
                for other, covered in self._leaves_over[step.call_id]:
                    self.unmasked[other] -= max(0, min(covered, step.covered) - masked)
        node = self._leaves[leaf]
        return AdmittedPath(leaf_call_id=node.call_id, role=node.record.role, targets=targets)
