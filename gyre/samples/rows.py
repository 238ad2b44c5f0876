"""Admitted trajectories as rows for the trainer (paper §5.3 "materialized from the stored token segments").

A row is the path exactly as the policy saw it, cut after its last target: what follows cannot influence a loss.
"""

from msgspec.structs import replace

from gyre.core.errors import InvariantViolation
from gyre.samples.admission import AdmittedPath
from gyre.samples.microstep import DISCARDED, ExecutionRows, Row
from gyre.trajectory.tree import TrajectoryTree


def build_row(tree: TrajectoryTree, admitted: AdmittedPath) -> Row:
    """Every target carries the log-prob and version recorded when it was sampled."""
    starts = {step.call_id: step.output_start for step in tree.path_steps(admitted.leaf_call_id)}
    targets: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for span in admitted.targets:
        node = tree.node(span.call_id)
        start = starts[span.call_id]
        targets.extend(range(start + span.start, start + span.stop))
        logprobs.extend(node.logprobs[span.start : span.stop].tolist())
        versions.extend(node.versions[span.start : span.stop].tolist())
    if not targets or targets[0] < 1:
        raise InvariantViolation(f"Trajectory {admitted.leaf_call_id} of {tree.execution_id} has no usable targets.")
    ids = tree.path_ids(admitted.leaf_call_id)
    return Row(
        ids_T=ids[: targets[-1] + 1],
        targets=targets,
        logprobs=logprobs,
        versions=versions,
        routing=tree.path_routing(admitted.leaf_call_id, targets[-1]),
    )


def build_execution(
    tree: TrajectoryTree, admitted: list[AdmittedPath], *, advantage: float, batch_executions: int
) -> ExecutionRows:
    """`batch_executions` is BN, the raw executions of the batch; the weight is 1/(BN·L_i), 0 when L_i = 0."""
    rows = [build_row(tree, path) for path in admitted]
    length = sum(len(row.targets) for row in rows)
    return ExecutionRows(
        execution_id=tree.execution_id,
        advantage=advantage,
        weight=1.0 / (batch_executions * length) if length else 0.0,
        rows=rows,
    )


def without_discarded(execution: ExecutionRows, newest: int) -> ExecutionRows:
    """Versions above `newest` become DISCARDED. Such targets train like others: what sampled them is gone, their
    behaviour log-probs are recorded."""
    rows = [
        replace(row, versions=[version if version <= newest else DISCARDED for version in row.versions])
        for row in execution.rows
    ]
    return replace(execution, rows=rows)


def dummy_execution(execution_id: str, *, advantage: float) -> ExecutionRows:
    """A complete failure without assessable work: counts in its group, L_i = 0, zero loss (paper §5.2)."""
    return ExecutionRows(execution_id=execution_id, advantage=advantage, weight=0.0, rows=[])
