"""Nodes of a trajectory tree: tokens shared by prefix, one node per record (paper §5.1 "Prefix sharing").

A node stores only what its call added: the input after the shared prefix, and the output. The path of a node is its
full prompt followed by its output. A child may cut anywhere inside its parent's own tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.core.records import ROLE_PRIORITY, CallRecord

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One call. Token arrays are int32; logprobs are the float64 values that the engine reported."""

    record: CallRecord
    """Everything but the token lists, which are empty here and live in the arrays below."""
    parent: "Node | None"
    tokens: Tokens
    """delta + output, [T_delta + T_out]."""
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int32]
    children: list["Node"] = field(default_factory=list)

    @property
    def call_id(self) -> str:
        return self.record.call_id

    @property
    def start(self) -> int:
        """Position of the node's first own token; equals prefix_len."""
        return self.record.prefix_len

    @property
    def end(self) -> int:
        """Length of the node's path."""
        return self.record.prefix_len + len(self.tokens)

    @property
    def output_len(self) -> int:
        return len(self.logprobs)

    @property
    def output_start(self) -> int:
        """Length of the full prompt: position of the first output token."""
        return self.end - self.output_len

    @property
    def eligible(self) -> bool:
        """Whether its output may be a target: sampled by the policy, kept by the harness, not auxiliary."""
        return self.record.trainable and self.record.role in ROLE_PRIORITY

    def to_record(self) -> CallRecord:
        """The stored form."""
        cut = len(self.tokens) - self.output_len
        return msgspec.structs.replace(
            self.record,
            delta_ids=self.tokens[:cut].tolist(),
            output_ids=self.tokens[cut:].tolist(),
            output_logprobs=self.logprobs.tolist(),
            output_versions=self.versions.tolist(),
        )


def make_node(record: CallRecord, parent: Node | None) -> Node:
    """Not linked yet: the caller appends it to its parent's children."""
    return Node(
        record=msgspec.structs.replace(record, delta_ids=[], output_ids=[], output_logprobs=[], output_versions=[]),
        parent=parent,
        tokens=as_tokens(record.delta_ids + record.output_ids),
        logprobs=np.asarray(record.output_logprobs, dtype=np.float64),
        versions=np.asarray(record.output_versions, dtype=np.int32),
    )


def as_tokens(ids: Any) -> Tokens:
    return np.asarray(ids, dtype=np.int32)


def path_tokens(node: Node | None, length: int) -> Tokens:
    """The first `length` tokens of the node's path, [length]. Reads each ancestor once."""
    parts: list[Tokens] = []
    while node is not None and length > 0:
        if length > node.start:
            parts.append(node.tokens[: length - node.start])
            length = node.start
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else as_tokens([])


def longest_prefix(
    ids: Tokens, roots: list[Node], at: Node | None = None, position: int = 0
) -> tuple[Node | None, int]:
    """The node and the number of tokens that its path shares with a prompt, as many as any stored path shares.

    `ids` are the prompt's tokens from `position` on; `at` is a node whose path shares the first `position` tokens. Ties
    go to the oldest node. Work is O(compared tokens): the shared part, and the first token of each branch beside it."""
    best, reach = at, position
    frontier: list[tuple[list[Node], int, int]] = [(roots if at is None else at.children, position, position)]
    while frontier:
        children, lowest, highest = frontier.pop()
        for child in children:
            start = child.record.prefix_len
            if not lowest <= start <= highest or start - position >= len(ids) or not len(child.tokens):
                continue
            rest = ids[start - position :]
            if child.tokens[0] != rest[0]:
                continue
            end = start + _common(child.tokens, rest)
            if end > reach or (end == reach and best is not None and child.record.seq < best.record.seq):
                best, reach = child, end
            frontier.append((child.children, start, end))
    return best, reach


def _common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
