"""Finding a request's history among the turns that the policy emitted (DESIGN §5 "Tool ids", notes/harnesses.md §4).

A turn is remembered with the messages that led to it. A conversation continues the deepest turn whose whole context it
repeats: emitted turns match by tool-call id, or by text where they called no tool; all other messages by content.
What follows is new: context messages, and assistant turns that the policy did not sample *here*.
"""

from dataclasses import dataclass, field

import msgspec

from gyre.trajectory.canonical import canonical_turn, drift_kinds, same_context, same_turn
from gyre.trajectory.conversation import Conversation, Message, Tool, ToolCall


@dataclass(slots=True, eq=False, repr=False)
class Turn:
    """One emitted assistant turn. `context` holds its request's messages after the turn continued."""

    call_id: str
    seq: int
    parent: "Turn | None"
    context: tuple[Message, ...]
    emitted: Message
    position: int
    """Index of the emitted message in a conversation that continues this turn."""
    children: list["Turn"] = field(default_factory=list)
    echoed: bool = False
    """Drift is counted at the first echo only."""


@dataclass(slots=True, eq=False, repr=False)
class _Root:
    tools: tuple[Tool, ...]
    children: list[Turn] = field(default_factory=list)


class Match(msgspec.Struct, frozen=True, kw_only=True):
    turn: str | None
    """Call id of the deepest turn that the conversation continues; None when it continues none."""
    start: int
    """Index of the first message after it."""
    fresh_echoes: tuple[str, ...] = ()
    """Turns that this conversation is the first to echo."""
    drift: dict[str, int] = {}
    """Differences between those turns and their echoes, by kind."""


class History:
    """The message side of one execution's tree. `remember` and `note_echoes` change it, nothing else does."""

    def __init__(self) -> None:
        self._roots: list[_Root] = []
        self._turns: dict[str, Turn] = {}
        self._by_tool_call: dict[str, tuple[Turn, ToolCall]] = {}
        self._by_content: dict[str, Turn] = {}

    def match(self, conversation: Conversation) -> Match:
        """Deterministic. Of equally deep candidates the latest wins: a repeated sample replaces its orphan."""
        best = self._deepest(conversation)
        fresh: list[str] = []
        drift: dict[str, int] = {}
        turn = best
        while turn is not None:
            if not turn.echoed:
                fresh.append(turn.call_id)
                for kind, count in drift_kinds(turn.emitted, conversation.messages[turn.position]).items():
                    drift[kind] = drift.get(kind, 0) + count
            turn = turn.parent
        if best is None:
            return Match(turn=None, start=0)
        return Match(turn=best.call_id, start=best.position + 1, fresh_echoes=tuple(fresh), drift=drift)

    def restore(self, message: Message) -> tuple[Message, str]:
        """An assistant turn outside its own context, with the payload that the policy emitted, and what it is:

        "context_turn": a whole turn of the policy (compaction tails, changed prefixes); "partial_turn": some of its
        calls; "foreign_turn": not the policy's. All three are context, never targets."""
        known = [self._by_tool_call.get(call.id) for call in message.tool_calls]
        if not message.tool_calls:
            turn = self._by_content.get(canonical_turn(message)) if message.text.strip() else None
            return (turn.emitted, "context_turn") if turn else (message, "foreign_turn")
        owner = known[0][0] if known[0] else None
        if owner and same_turn(owner.emitted, message):
            return owner.emitted, "context_turn"
        calls = tuple(
            ToolCall(call.id, found[1].name, found[1].arguments) if found else call
            for call, found in zip(message.tool_calls, known, strict=True)
        )
        restored = msgspec.structs.replace(message, tool_calls=calls)
        return restored, "partial_turn" if any(known) else "foreign_turn"

    def remember(self, call_id: str, seq: int, conversation: Conversation, match: Match, emitted: Message) -> None:
        """Adds the turn that answered `conversation`; `match` is that conversation's match."""
        parent = self._turns[match.turn] if match.turn is not None else None
        turn = Turn(
            call_id=call_id,
            seq=seq,
            parent=parent,
            context=conversation.messages[match.start :],
            emitted=emitted,
            position=len(conversation.messages),
        )
        if parent is not None:
            parent.children.append(turn)
        else:
            self._root(conversation.tools).children.append(turn)
        self._turns[call_id] = turn
        for call in emitted.tool_calls:
            self._by_tool_call[call.id] = (turn, call)
        self._by_content[canonical_turn(emitted)] = turn

    def note_echoes(self, call_ids: tuple[str, ...]) -> None:
        for call_id in call_ids:
            self._turns[call_id].echoed = True

    def knows_tool_call(self, tool_call_id: str) -> bool:
        return tool_call_id in self._by_tool_call

    def fingerprint(self) -> list[tuple[str, str, int, bool]]:
        """Everything that a later match depends on, for the tree's digest."""
        return [
            (turn.call_id, turn.parent.call_id if turn.parent else "", turn.position, turn.echoed)
            for turn in self._turns.values()
        ]

    def _deepest(self, conversation: Conversation) -> Turn | None:
        messages = conversation.messages
        root = next((root for root in self._roots if root.tools == conversation.tools), None)
        best: Turn | None = None
        frontier = [(root.children, 0)] if root else []
        while frontier:
            children, start = frontier.pop()
            for turn in children:
                echo = turn.position
                if echo >= len(messages) or messages[echo].role != "assistant":
                    continue
                if not _same_messages(turn.context, messages[start:echo]):
                    continue
                if not (same_turn(turn.emitted, messages[echo]) or _answered(turn.emitted, messages, echo)):
                    continue
                if best is None or (echo, turn.seq) > (best.position, best.seq):
                    best = turn
                frontier.append((turn.children, echo + 1))
        return best

    def _root(self, tools: tuple[Tool, ...]) -> _Root:
        for root in self._roots:
            if root.tools == tools:
                return root
        self._roots.append(_Root(tools))
        return self._roots[-1]


def _same_messages(stored: tuple[Message, ...], incoming: tuple[Message, ...]) -> bool:
    return stored == incoming or (
        len(stored) == len(incoming) and all(same_context(a, b) for a, b in zip(stored, incoming, strict=True))
    )


def _answered(emitted: Message, messages: tuple[Message, ...], echo: int) -> bool:
    """Whether an echo that lost its calls is followed by the results of exactly these calls (case T04)."""
    if messages[echo].tool_calls or not emitted.tool_calls:
        return False
    results = set()
    for message in messages[echo + 1 :]:
        if message.role != "tool":
            break
        results.add(message.tool_call_id)
    return results == {call.id for call in emitted.tool_calls}
