"""Which requests are repeats of an earlier call, and which ask for another sample (docs/architecture.md).

A harness that repeats a request either lost the answer or wants another one. Only the first is a retry:

    same agent, same conversation, same wishes, and …              the request gets
    an answer that was sampled and reached nobody whole            that answer, byte for byte
    the request says that it is a retry (a count, a repeated key)  the latest such call: attached, or the same events
    neither                                                        a sample of its own, a sibling in the tree

A call that failed or was abandoned is forgotten, so its retry is sampled anew; what it is owed is remembered, since
otherwise a marked retry of it would get the answer of a sibling that runs beside it.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from gyre.proxy.dialects.base import WireRequest
from gyre.proxy.dialects.memo import identity
from gyre.proxy.session.call import Asked, ModelCall
from gyre.trajectory.roles import Classification

_COUNT = "x-stainless-retry-count"
"""Of the SDKs of OpenAI and Anthropic, from 0."""
_KEY = "idempotency-key"
"""The same for all tries of one request, another one for the next request."""


class Repeats:
    """The calls of one session that a later request may be a retry of."""

    def __init__(self) -> None:
        self._calls: dict[bytes, list[ModelCall]] = {}
        self._owed: Counter[bytes] = Counter()
        self._undelivered: dict[str, ModelCall] = {}
        """By id: those not told of by `newly_delivered`."""

    def find(self, key: bytes, headers: Mapping[str, str]) -> ModelCall | None:
        """The call that a request with this key repeats; None when it is a new one."""
        calls = self._calls.get(key, [])
        lost = next((call for call in calls if call.lost), None)
        if lost is not None:
            return lost
        if self._owed[key]:
            self._owed[key] -= 1
            return None
        return calls[-1] if calls and says_retry(headers) else None

    def add(self, call: ModelCall) -> None:
        self._calls.setdefault(call.asked.key, []).append(call)
        if not call.delivered:
            self._undelivered[call.head.id] = call

    def newly_delivered(self) -> list[str]:
        """Ids of the calls whose answers were delivered since this was asked last."""
        delivered = [call_id for call_id, call in self._undelivered.items() if call.delivered]
        for call_id in delivered:
            del self._undelivered[call_id]
        return delivered

    def refused(self, key: bytes) -> None:
        """A request was answered with an error, or given up: its retry is a new call."""
        self._owed[key] += 1

    def drop(self, call: ModelCall) -> None:
        """The call failed or was abandoned."""
        calls = self._calls.get(call.asked.key, [])
        if call in calls:
            calls.remove(call)
            self._undelivered.pop(call.head.id, None)
            self.refused(call.asked.key)

    def clear(self) -> None:
        self._calls.clear()
        self._owed.clear()


def says_retry(headers: Mapping[str, str]) -> bool:
    """Whether a request says that it was sent before. `headers` have lower-case names."""
    count = headers.get(_COUNT, "")
    return (count.isascii() and count.isdigit() and int(count) > 0) or _KEY in headers


def asked(wire: WireRequest, kind: Classification) -> Asked:
    """Whether the answer is streamed is left out, since clients repeat a failed stream without streaming."""
    who = identity(msgspec.json.encode((kind.role, kind.agent_id)))
    named = wire.facts.headers.get(_KEY, "").encode()
    question = identity(who, wire.identity)
    return Asked(key=identity(question, wire.wishes, identity(named)), question=question, role=kind.role)
