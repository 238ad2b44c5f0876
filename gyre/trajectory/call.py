"""One model call as its tree sees it: prepared, then sampled, then a step on the paths that go through it."""

import msgspec

from gyre.chat.conversation import Conversation
from gyre.core.errors import GyreError
from gyre.core.expert_routing import ExpertRouting
from gyre.core.records import FinishReason, RoleClass
from gyre.core.tokens import TokenIds
from gyre.trajectory.history import Match
from gyre.trajectory.paths import PathIds


class CommitRefused(GyreError):
    """A sample does not belong to the prepared call; the tree did not change."""


class EmptyConversation(GyreError):
    """No message of a request says anything: there is nothing to answer."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine returned for one call; the three lists have equal length [T_out]."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: FinishReason
    cells: list[int] = []
    routing: ExpertRouting | None = None
    """Experts of positions from the prepared call's `routing_from` on, as far as they were told."""


class PreparedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What to send to an engine, and where its answer will be appended. Stays valid while other calls commit."""

    execution_id: str
    conversation: Conversation
    role: RoleClass
    agent_id: str
    path: PathIds
    """What the prompt continues: the whole path of a recorded call, or nothing."""
    new_ids: list[int]
    """The rest of the prompt: what was rendered for this call."""
    parent: str | None
    prefix_len: int
    """Tokens shared with the parent's path; at least those of `path`."""
    drift: dict[str, int]
    """Differences between emitted turns and their first echo in this conversation, by kind."""
    flags: list[str]
    """Sorted: "context_turn", "edited_turn", "partial_turn", "foreign_turn" (assistant turns that are context only
    here), and "prefix_break" (the conversation continues a recorded turn whose tokens could not be continued)."""
    match: Match
    nodes_seen: int
    """Size of the tree at prepare; commit looks for a longer shared prefix when it has grown since."""

    @property
    def input_len(self) -> int:
        """T_in."""
        return len(self.path) + len(self.new_ids)

    @property
    def input_ids(self) -> list[int]:
        """Full prompt, [T_in]: path(parent)[:prefix_len] + delta_ids. A new list at each access, O(T_in)."""
        ids = self.path.slice(0)
        ids += self.new_ids
        return ids

    @property
    def prompt(self) -> TokenIds:
        """`input_ids`, packed: what an engine is sent. A new object at each access."""
        return self.path.followed_by(self.new_ids)

    @property
    def routing_from(self) -> int:
        """First position whose experts the record will hold: that of the last shared token, which may not have gone
        through the model when its own call ended."""
        return max(self.prefix_len - 1, 0)

    @property
    def delta_ids(self) -> list[int]:
        """Input tokens that no stored path shares, [T_delta]."""
        return self.new_ids[self.prefix_len - len(self.path) :]


class PathStep(msgspec.Struct, frozen=True, kw_only=True):
    """One call on a root-to-leaf path."""

    call_id: str
    output_start: int
    """Position in the path of the call's first output token."""
    covered: int
    """Output tokens of the call that lie on the path; fewer than all when the path branches off inside them."""
