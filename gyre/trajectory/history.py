"""Finding a request's history among the turns that the policy emitted (docs/harnesses.md).

A turn is remembered with the messages that led to it. A conversation continues the deepest turn whose whole context it
repeats: emitted turns match by tool-call id, or by text where they called no tool; all other messages by content.
What follows is new: context messages, and assistant turns that the policy did not sample *here*.

The first echo of a turn shows how this harness rewrites: the payload of its calls is restored, its reasoning may be
gone. Any other change, and any change at all of a later echo, is an edit (`canonical.is_edited`): the conversation
leaves the path before that turn, the policy sees what the harness sent, and the edit is counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from gyre.chat.canonical import (
    canonical_turn,
    drift_kinds,
    echo_form,
    is_edited,
    same_context,
    same_payload,
    same_turn,
)
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
    echo: Message | None = None
    """As it first came back. Drift is counted then, only. The turns before an echoed one are echoed too."""
    edit: str = ""
    """Form of the edit that was counted last; its branch repeats it in every request."""


_Places = dict[tuple[int, Identity], list[Turn]]
"""(position, identity) → turns in commit order."""


class Match(msgspec.Struct, frozen=True, kw_only=True):
    turn: str | None
    """Call id of the deepest turn that the conversation continues; None when it continues none."""
    start: int
    """Index of the first message after it."""
    fresh_echoes: tuple[str, ...] = ()
    """Turns that this conversation is the first to echo."""
    fresh_edits: dict[str, str] = {}
    """Turns that it has in an edited form, after what it continues, and that form; edits counted before are absent."""
    drift: dict[str, int] = {}
    """Differences between those turns and how they came back, by kind."""
    known: tuple[Message, ...] = ()
    """Stored messages that equal the conversation's first ones, so that they are stored once."""


class TurnEntry(msgspec.Struct, frozen=True, kw_only=True):
    """All that a history learns from one recorded call. A history is the entries that it was given, in order."""

    call_id: str
    seq: int
    """Of the call's record."""
    agent_id: str = ""
    parent: str | None = None
    """The turn that the request continued."""
    tools: tuple[Tool, ...] = ()
    context: tuple[Message, ...] = ()
    """Messages of the request after that turn."""
    position: int = 0
    """Messages of the whole request."""
    emitted: Message | None = None
    """None: the harness was given nothing (an orphan)."""
    echoes: dict[str, Message] = {}
    """Turns that the request was the first to echo, as it did."""
    edits: dict[str, str] = {}
    """Turns that it had in an edited form, and that form."""


class History:
    """The message side of one execution's tree. Only `apply` changes it."""

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
        fresh: list[str] = []
        drift: Counter[str] = Counter()
        turn = best
        while turn is not None and turn.echo is None:
            fresh.append(turn.call_id)
            drift.update(drift_kinds(turn.emitted, conversation.messages[turn.position]))
            turn = turn.parent
        edits: dict[str, str] = {}
        for turn, copy in self._edited(conversation, best):
            form = echo_form(copy)
            if form != turn.edit and turn.call_id not in edits:
                edits[turn.call_id] = form
                drift.update(drift_kinds(turn.echo or turn.emitted, copy))
        return Match(
            turn=best.call_id if best else None,
            start=best.position + 1 if best else 0,
            fresh_echoes=tuple(fresh),
            fresh_edits=edits,
            drift=dict(drift),
            known=known,
        )

    def _edited(self, conversation: Conversation, best: Turn | None) -> Iterator[tuple[Turn, Message]]:
        """Turns that the rest of a conversation has in an edited form: those of known calls wherever they stand, and
        the answer to what was continued where the conversation has another text in its place."""
        start = best.position + 1 if best else 0
        first = True
        for position in range(start, len(conversation.messages)):
            copy = conversation.messages[position]
            if copy.role != "assistant":
                continue
            turn = self._owner(copy)
            if turn is None and first and not copy.tool_calls:
                turn = self._answer_at(conversation, best, position)
            if turn is not None and is_edited(turn.emitted, turn.echo, copy):
                yield turn, copy
            first = False

    def _owner(self, copy: Message) -> Turn | None:
        """The turn of which `copy` has exactly the calls."""
        found = self._by_tool_call.get(copy.tool_calls[0].id) if copy.tool_calls else None
        return found[0] if found and same_turn(found[0].emitted, copy) else None

    def _answer_at(self, conversation: Conversation, best: Turn | None, position: int) -> Turn | None:
        """The latest turn that followed `best` at this place, after the same messages, when no turn there said this."""
        start = best.position + 1 if best else 0
        asked = conversation.messages[start:position]
        beside = [
            turn
            for places in [self._places(conversation.tools)]
            for turns in places.values()
            for turn in turns
            if turn.parent is best and turn.position == position and _same_messages(turn.context, asked)
        ]
        return beside[-1] if beside else None

    def restore(self, message: Message) -> tuple[Message, str]:
        """An assistant turn outside its own context, with the payloads that the policy emitted, and what it is:

        "context_turn": a whole turn of the policy (compaction tails, changed prefixes); "edited_turn": one that the
        harness edited, with what the harness made of it; "partial_turn": some of its calls; "foreign_turn": not the
        policy's. All four are context, never targets."""
        if not message.tool_calls:
            turn = self._by_content.get(canonical_turn(message)) if message.text.strip() else None
            if turn is None:
                return message, "foreign_turn"
            edited = is_edited(turn.emitted, turn.echo, message)
            return (message, "edited_turn") if edited else (turn.emitted, "context_turn")
        owner = self._owner(message)
        if owner and not is_edited(owner.emitted, owner.echo, message):
            return owner.emitted, "context_turn"
        known = [self._by_tool_call.get(call.id) for call in message.tool_calls]
        calls = tuple(
            _restored(call, *found) if found else call for call, found in zip(message.tool_calls, known, strict=True)
        )
        restored = msgspec.structs.replace(message, tool_calls=calls)
        return restored, "edited_turn" if owner else "partial_turn" if any(known) else "foreign_turn"

    def entry(
        self, call_id: str, seq: int, agent_id: str, conversation: Conversation, match: Match, emitted: Message | None
    ) -> TurnEntry:
        """What there is to learn from a call of the agent that answered `conversation`, whose match is `match`."""
        messages = match.known + conversation.messages[len(match.known) :]
        return TurnEntry(
            call_id=call_id,
            seq=seq,
            agent_id=agent_id,
            parent=match.turn,
            tools=conversation.tools,
            context=messages[match.start :],
            position=len(messages),
            emitted=emitted,
            echoes={call: messages[self._turns[call].position] for call in match.fresh_echoes},
            edits=match.fresh_edits,
        )

    def apply(self, entry: TurnEntry) -> None:
        """Learns it. Entries come in the order of their calls' commits."""
        for call_id, echo in entry.echoes.items():
            # A request that was prepared at the same time may have been the first.
            self._turns[call_id].echo = self._turns[call_id].echo or echo
        for call_id, form in entry.edits.items():
            self._turns[call_id].edit = form
        if entry.emitted is None:
            return
        turn = Turn(
            call_id=entry.call_id,
            seq=entry.seq,
            agent_id=entry.agent_id,
            parent=self._turns[entry.parent] if entry.parent is not None else None,
            context=entry.context,
            emitted=entry.emitted,
            position=entry.position,
        )
        self._turns[turn.call_id] = turn
        by_place = self._places(entry.tools)
        if not by_place:
            self._offers.append((entry.tools, by_place))
        by_place.setdefault((turn.position, _identity(turn.emitted)), []).append(turn)
        for call in turn.emitted.tool_calls:
            self._by_tool_call[call.id] = (turn, call)
        self._by_content[canonical_turn(turn.emitted)] = turn

    def keep(self, entry: TurnEntry, match: Match, conversation: Conversation) -> None:
        """Keeps the request whole, for the next one of its agent. Results never depend on it."""
        if entry.emitted is None:
            return
        self._latest.pop(match.turn or "", None)
        self._latest[entry.call_id] = match.known + conversation.messages[len(match.known) :]
        if len(self._latest) > _LATEST:
            del self._latest[next(iter(self._latest))]

    def echoed(self, call_id: str) -> bool:
        """Whether a later request held that turn: the harness has it."""
        return self._turns[call_id].echo is not None

    def knows_tool_call(self, tool_call_id: str) -> bool:
        return tool_call_id in self._by_tool_call

    def fingerprint(self) -> list[tuple[str, str, int, str, str]]:
        """Everything that a later match depends on, for the tree's digest."""
        return [
            (
                turn.call_id,
                turn.parent.call_id if turn.parent else "",
                turn.position,
                echo_form(turn.echo) if turn.echo else "",
                turn.edit,
            )
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
                    if is_edited(turn.emitted, turn.echo, messages[at]):
                        continue
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
            and messages[step.position].role == "assistant"
            and _same_messages(step.context, messages[start : step.position])
            and _identity(step.emitted) in _identities(messages, step.position)
            and not is_edited(step.emitted, step.echo, messages[step.position])
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


def _restored(call: ToolCall, turn: Turn, emitted: ToolCall) -> ToolCall:
    """The payload that the policy emitted, unless the harness has changed it since it first sent it back."""
    first = next((echo for echo in turn.echo.tool_calls if echo.id == call.id), None) if turn.echo else None
    if first is not None and not same_payload(first, call):
        return call
    return ToolCall(call.id, emitted.name, emitted.arguments)


def _same_messages(stored: tuple[Message, ...], incoming: tuple[Message, ...]) -> bool:
    return stored == incoming or (
        len(stored) == len(incoming) and all(same_context(a, b) for a, b in zip(stored, incoming, strict=True))
    )
