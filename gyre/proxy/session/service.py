"""How an execution was served: which of its calls the platform failed, and which answers ran into the token limit.

The outcome of an execution depends on it (docs/outcomes.md): what the policy did is graded, what the platform failed to
do is not. Requests are told apart by agent and conversation, so a request that failed and was asked again, in whatever
form, counts as served once it has its answer. Pure state, one per session.
"""

from collections import Counter

from gyre.core.records import FinishReason, RoleClass
from gyre.proxy.base import LastAnswer
from gyre.proxy.errors import CallError, Fault
from gyre.proxy.session.call import Asked

_CAUSES = {Fault.UNAVAILABLE: "no_engine", Fault.INTERNAL: "error"}
"""Faults that are the platform's. All others are the harness's own, or the end of its execution."""


class Service:
    def __init__(self) -> None:
        self.failed_calls: Counter[str] = Counter()
        self.cut_answers = 0
        self.last_answer: LastAnswer = "none"
        self._unserved: set[bytes] = set()

    @property
    def unserved(self) -> int:
        return len(self._unserved)

    def answered(self, asked: Asked, finish: FinishReason) -> None:
        """A call was answered and recorded."""
        self._unserved.discard(asked.question)
        self.cut_answers += finish == "length"
        if asked.role is not RoleClass.AUXILIARY:
            self.last_answer = "cut" if finish == "length" else "whole"

    def failed(self, asked: Asked, error: CallError) -> None:
        """A call was answered with an error; counts when that was the platform's doing."""
        cause = _CAUSES.get(error.fault)
        if cause is None:
            return
        self.failed_calls[cause] += 1
        if asked.role is not RoleClass.AUXILIARY:
            self._unserved.add(asked.question)
            self.last_answer = "failed"

    def waited_in_vain(self, asked: Asked) -> None:
        """A harness gave a call up, or its time was over, while no engine had taken the call."""
        self.failed(asked, CallError(Fault.UNAVAILABLE, "No engine took this call in time."))
