"""Finding a request's history among the turns that the policy emitted (docs/harnesses.md).

A turn is remembered with the messages that led to it. A conversation continues the deepest turn whose whole context it
repeats: emitted turns match by tool-call id, or by text where they called no tool; all other messages by content.
What follows is new: context messages, and assistant turns that the policy did not sample *here*.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from gyre.chat.canonical import canonical_turn, drift_kinds, same_context, same_turn
from gyre.chat.conversation import Conversation, Message, Tool, ToolCall

_LATEST = 32
"""Requests kept whole, so that the next one of each agent is compared in one piece."""

Identity = frozenset[str] | str
"""What a turn is known by: the ids of its calls, or its text where it has none."""


@dataclass(slots=True, eq=False, repr=False)
class Turn:
    """One emitted assistant turn. `context` holds its request's messages after the turn continued."""

    call_id: str
    seq: int
    agent_id: str
    parent: "Turn | None"
    context: tuple[Message, ...]
    emitted: Message
    position: int
    """Index of the emitted message in a conversation that continues this turn."""
    echoed: bool = False
    """Drift is counted at the first echo only. The turns before an echoed one are echoed too."""


_Places = dict[tuple[int, Identity], list[Turn]]
"""(position, identity) → turns in commit order."""


class Match(msgspec.Struct, frozen=True, kw_only=True):
    turn: str | None
    """Call id of the deepest turn that the conversation continues; None when it continues none."""
    start: int
    """Index of the first message after it."""
    fresh_echoes: tuple[str, ...] = ()
    """Turns that this conversation is the first to echo."""
    drift: dict[str, int] = {}
    """Differences between those turns and their echoes, by kind."""
    known: tuple[Message, ...] = ()
    """Stored messages that equal the conversation's first ones, so that they are stored once."""


class History:
    """The message side of one execution's tree. `remember` and `note_echoes` change it, nothing else does."""

    def __init__(self) -> None:
        self._offers: list[tuple[tuple[Tool, ...], _Places]] = []
        """The turns of all conversations that offer the same tools."""
        self._turns: dict[str, Turn] = {}
        self._by_tool_call: dict[str, tuple[Turn, ToolCall]] = {}
        self._by_content: dict[str, Turn] = {}
        self._latest: dict[str, tuple[Message, ...]] = {}
        """Turn → the messages of its request. Derived data: matches never depend on what is kept."""

    def match(self, conversation: Conversation, agent_id: str) -> Match:
        """Deterministic. Agents that began alike may have said the same words after different thoughts: of equally deep
        candidates the agent's own come first, then those that are echoed with their reasoning, then the latest."""
        best, known = self._deepest(conversation, agent_id)
        if best is None:
            return Match(turn=None, start=0)
        fresh: list[str] = []
        drift: dict[str, int] = {}
        turn: Turn | None = best
        while turn is not None and not turn.echoed:
            fresh.append(turn.call_id)
            for kind, count in drift_kinds(turn.emitted, conversation.messages[turn.position]).items():
                drift[kind] = drift.get(kind, 0) + count
            turn = turn.parent
        return Match(turn=best.call_id, start=best.position + 1, fresh_echoes=tuple(fresh), drift=drift, known=known)

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

    def remember(
        self, call_id: str, seq: int, agent_id: str, conversation: Conversation, match: Match, emitted: Message
    ) -> None:
        """Adds the agent's turn that answered `conversation`; `match` is that conversation's match."""
        messages = match.known + conversation.messages[len(match.known) :]
        turn = Turn(
            call_id=call_id,
            seq=seq,
            agent_id=agent_id,
            parent=self._turns[match.turn] if match.turn is not None else None,
            context=messages[match.start :],
            emitted=emitted,
            position=len(messages),
        )
        self._turns[call_id] = turn
        by_place = self._places(conversation.tools)
        if not by_place:
            self._offers.append((conversation.tools, by_place))
        by_place.setdefault((turn.position, _identity(emitted)), []).append(turn)
        for call in emitted.tool_calls:
            self._by_tool_call[call.id] = (turn, call)
        self._by_content[canonical_turn(emitted)] = turn
        self._latest.pop(match.turn or "", None)
        self._latest[call_id] = messages
        if len(self._latest) > _LATEST:
            del self._latest[next(iter(self._latest))]

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

    def _deepest(self, conversation: Conversation, agent_id: str) -> tuple[Turn | None, tuple[Message, ...]]:
        """The turn to continue, and the stored messages before it when they are kept in one piece."""
        messages = conversation.messages
        by_place = self._places(conversation.tools)
        checked: dict[str, bool] = {}
        for at in range(len(messages) - 1, -1, -1) if by_place else ():
            if messages[at].role != "assistant":
                continue
            for name in _identities(messages, at):
                turns = list(by_place.get((at, name), ()))
                if len(turns) > 1:
                    # Stable: the latest first among equals.
                    turns.sort(key=lambda turn: turn.seq, reverse=True)
                    turns.sort(key=lambda turn: (turn.agent_id != agent_id, turn.emitted != messages[at]))
                for turn in turns:
                    known = self._latest.get(turn.call_id, ())
                    if known and known == messages[:at]:
                        return turn, known
                    if _repeats(messages, turn, checked):
                        return turn, ()
        return None, ()

    def _places(self, tools: tuple[Tool, ...]) -> _Places:
        return next((places for known, places in self._offers if known == tools), {})


def _repeats(messages: tuple[Message, ...], turn: Turn, checked: dict[str, bool]) -> bool:
    """Whether a conversation repeats everything up to a turn; `checked` holds the answers for this conversation."""
    line: list[Turn] = []
    ancestor: Turn | None = turn
    while ancestor is not None and ancestor.call_id not in checked:
        line.append(ancestor)
        ancestor = ancestor.parent
    repeats = ancestor is None or checked[ancestor.call_id]
    for step in reversed(line):
        start = step.parent.position + 1 if step.parent else 0
        repeats = (
            repeats
            and _same_messages(step.context, messages[start : step.position])
            and _identity(step.emitted) in _identities(messages, step.position)
        )
        checked[step.call_id] = repeats
    return repeats


def _identity(emitted: Message) -> Identity:
    return frozenset(call.id for call in emitted.tool_calls) or emitted.text.strip()


def _identities(messages: tuple[Message, ...], echo: int) -> Iterator[Identity]:
    """What the emitted turn may be known by, the surest first. An echo that lost its calls is followed by their results
    (case T04), which say more than its text."""
    if not messages[echo].tool_calls:
        results = set()
        for message in messages[echo + 1 :]:
            if message.role != "tool":
                break
            results.add(message.tool_call_id)
        if results:
            yield frozenset(results)
    yield _identity(messages[echo])


def _same_messages(stored: tuple[Message, ...], incoming: tuple[Message, ...]) -> bool:
    return stored == incoming or (
        len(stored) == len(incoming) and all(same_context(a, b) for a, b in zip(stored, incoming, strict=True))
    )
