"""What a tree refuses: samples that cannot belong to the prepared call, and stored records that form no tree. Pure."""

from collections.abc import Callable, Container, Mapping

from msgspec import UNSET

from gyre.chat.conversation import Message
from gyre.core.errors import InvariantViolation
from gyre.core.records import CallRecord
from gyre.trajectory.call import CommitRefused, PreparedCall, Sample
from gyre.trajectory.expert_routing import recorded_positions
from gyre.trajectory.node import Node


def check_commit(
    prepared: PreparedCall,
    sample: Sample,
    emitted: Message | None,
    call_id: str,
    *,
    execution_id: str,
    recorded: Container[str],
    issued: Callable[[str], bool],
) -> None:
    """Raises CommitRefused. `recorded`: the calls of the tree; `issued`: whether a tool-call id was given out."""
    problem = ""
    if prepared.execution_id != execution_id:
        problem = f"it was prepared for execution {prepared.execution_id}"
    elif prepared.parent is not None and prepared.parent not in recorded:
        problem = f"its parent {prepared.parent} is not in the tree"
    elif call_id in recorded:
        problem = "the call is already recorded"
    elif not len(sample.output_ids) == len(sample.logprobs) == len(sample.versions):
        problem = (
            f"the sample has {len(sample.output_ids)} tokens, {len(sample.logprobs)} log-probs and "
            f"{len(sample.versions)} versions"
        )
    elif sample.routing is not None and (
        sample.routing.positions > prepared.input_len + len(sample.output_ids) - 1 - prepared.routing_from
    ):
        problem = f"the sample has experts for {sample.routing.positions} positions, more than went through the model"
    elif emitted is not None and emitted.role != "assistant":
        problem = f"the emitted message has role {emitted.role}"
    elif emitted is not None:
        taken = [call.id for call in emitted.tool_calls if issued(call.id)]
        problem = f"tool-call id {taken[0]} was issued before" if taken else ""
    if problem:
        raise CommitRefused(f"Call {call_id} of {execution_id} cannot be recorded: {problem}.")


def check_record(record: CallRecord, execution_id: str, nodes: Mapping[str, Node]) -> None:
    """Whether a stored record can come next in a tree of `nodes`. Raises InvariantViolation."""
    parent = nodes.get(record.parent) if record.parent is not None else None
    lengths = {len(record.output_ids), len(record.output_logprobs), len(record.output_versions)}
    if record.execution_id != execution_id or record.call_id in nodes or len(lengths) != 1:
        raise InvariantViolation(f"Record {record.call_id} of {record.execution_id} is broken or a duplicate.")
    if record.parent is not None and (parent is None or record.prefix_len > parent.end):
        raise InvariantViolation(
            f"Record {record.call_id} of {record.execution_id} does not fit its parent {record.parent}."
        )
    if record.parent is None and record.prefix_len != 0:
        raise InvariantViolation(f"Record {record.call_id} of {record.execution_id} is a root with a prefix.")
    if record.routing is not UNSET and record.routing.positions != recorded_positions(record):
        raise InvariantViolation(
            f"Record {record.call_id} of {record.execution_id} has experts for {record.routing.positions} "
            f"positions, not {recorded_positions(record)}."
        )
