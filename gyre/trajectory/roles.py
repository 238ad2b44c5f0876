"""Which role class does a call have? Profiles are data; this is the one decision that reads them (docs/exactness.md).

Order of evidence (docs/harnesses.md): model name, headers and metadata first, then text markers, then divergence of
the system prompt from the execution's main one. Sub-agent and compaction request are independent; together they give
the four role classes. Auxiliary calls (titles, memory extraction) are recognised before anything else.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from gyre.core.records import RoleClass


class RoleMarkers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a harness profile that tells calls apart. Text markers are substrings; headers are lower case."""

    sub_agent_headers: list[str] = []
    """A call that carries any of these is a sub-agent's."""
    agent_id_headers: list[str] = []
    """The first of these that is present names the agent of a sub-agent call."""
    sub_agent_system: list[str] = []
    """Markers in the system prompt of sub-agents."""
    sub_agent_by_system: bool = False
    """A system prompt other than the main one is a sub-agent's (harnesses that send no id at all)."""
    summary_metadata: dict[str, str] = {}
    """Metadata key → value of a compaction request."""
    summary_last_user: list[str] = []
    """Markers in the last user message of a compaction request."""
    summary_system: list[str] = []
    """Markers in the system prompt of a compaction request."""
    summary_toolless_user: list[str] = []
    """Markers in the last user message that count only when the call offers no tools."""
    auxiliary_models: list[str] = []
    """Model names that only auxiliary calls ask for."""
    auxiliary_system: list[str] = []
    """Markers in the system prompt of auxiliary calls."""
    canned_assistant: list[str] = []
    """Assistant texts that the harness writes itself; they are context, never targets."""


class CallFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy saw of a call, independent of the dialect."""

    model: str = ""
    headers: dict[str, str] = {}
    """Names in lower case."""
    metadata: dict[str, str] = {}
    """Flat metadata of body or headers (Codex turn metadata, for instance), values as text."""
    system: str = ""
    first_user: str = ""
    """User text before the first turn that the harness did not write itself: the task of this agent."""
    last_user: str = ""
    tools: int = 0
    """Number of tools offered."""
    stream: bool = True
    main_system: str = ""
    """System prompt of the execution's first call that was classified main; "" before there was one."""
    known_agents: frozenset[str] = frozenset()
    """Agent ids of the execution's sub-agent calls so far."""
    history_agent: str = ""
    """Agent id of the sub-agent that sampled the last tool call of the history; "" when no sub-agent did."""


class Classification(msgspec.Struct, frozen=True):
    role: RoleClass
    agent_id: str = ""
    """"" for the main agent."""


def classify(markers: RoleMarkers, facts: CallFacts) -> Classification:
    """Role class and agent of one call. Total: what no marker recognises is the main agent's."""
    if facts.model in markers.auxiliary_models or _contains(facts.system, markers.auxiliary_system):
        return Classification(RoleClass.AUXILIARY)
    summary = _is_summary(markers, facts)
    agent_id = _agent_id(markers, facts, summary)
    if agent_id:
        return Classification(RoleClass.SUB_AGENT_SUMMARY if summary else RoleClass.SUB_AGENT, agent_id)
    return Classification(RoleClass.MAIN_SUMMARY if summary else RoleClass.MAIN)


def is_canned(markers: RoleMarkers, assistant_text: str) -> bool:
    """Whether an assistant turn of a history was written by the harness itself."""
    return assistant_text.strip() in markers.canned_assistant


def _is_summary(markers: RoleMarkers, facts: CallFacts) -> bool:
    if any(facts.metadata.get(key) == value for key, value in markers.summary_metadata.items()):
        return True
    if _contains(facts.last_user, markers.summary_last_user) or _contains(facts.system, markers.summary_system):
        return True
    return facts.tools == 0 and _contains(facts.last_user, markers.summary_toolless_user)


def _agent_id(markers: RoleMarkers, facts: CallFacts, summary: bool) -> str:
    by_header = any(facts.headers.get(name) for name in markers.sub_agent_headers)
    by_text = _contains(facts.system, markers.sub_agent_system)
    # A compaction request may bring a system prompt of its own: that alone does not make it a sub-agent's.
    by_divergence = (
        markers.sub_agent_by_system and bool(facts.main_system) and facts.system != facts.main_system and not summary
    )
    named = next((facts.headers[name] for name in markers.agent_id_headers if facts.headers.get(name)), "")
    # opencode's compaction request of a sub-agent bears its id and nothing else that tells it from the main agent's;
    # Qwen Code's bears no id, but calls that the sub-agent made.
    if not (by_header or by_text or by_divergence or named in facts.known_agents):
        return facts.history_agent
    return named or facts.history_agent or "agent-" + _digest(facts.system, facts.first_user)


def _contains(text: str, markers: Sequence[str]) -> bool:
    return any(marker in text for marker in markers)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:12]
