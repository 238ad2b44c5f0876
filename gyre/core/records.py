"""What is recorded about a model call, and what an execution is worth.

Shape suffixes: `_T` tokens. All id lists hold vocabulary ids.
"""

from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gyre.core.expert_routing import ExpertRouting


class RoleClass(StrEnum):
    """Role of a trajectory in its execution, highest admission priority first (paper §5.3)."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    AUXILIARY = "auxiliary"


ROLE_PRIORITY: tuple[RoleClass, ...] = (
    RoleClass.MAIN,
    RoleClass.MAIN_SUMMARY,
    RoleClass.SUB_AGENT,
    RoleClass.SUB_AGENT_SUMMARY,
)
"""Classes that may contribute targets, in admission order. AUXILIARY is absent: never a target."""

FinishReason = Literal["stop", "length", "abort"]


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The TITO record of one committed call: exact tokens in and out.

    The full prompt of the call is `path(parent)[:prefix_len] + delta_ids`, where `path(parent)` is the parent's full
    prompt followed by its `output_ids`; `prefix_len` equals the length of the parent's path unless the call branches
    inside it. The recorded prompt is what the engine confirmed, byte for byte.
    """

    execution_id: str
    call_id: str
    seq: int
    """Commit order inside the execution, from 0."""
    parent: str | None
    """Call id of the record whose path this call extends; None for a root."""
    prefix_len: int
    """Tokens shared with the parent's path; 0 for a root."""
    delta_ids: list[int]
    """Input tokens after the shared prefix, [T_delta]: context, never targets."""
    output_ids: list[int]
    """Sampled tokens incl. the stop token when the engine emitted one, [T_out]."""
    output_logprobs: list[float]
    """Behaviour log-probability of each output token under the distribution sampled from, [T_out]."""
    output_versions: list[int]
    """Policy version that produced each output token, [T_out]."""
    role: RoleClass
    agent_id: str = ""
    """Harness agent or thread inside the execution; "" is the main agent."""
    trainable: bool = True
    """False for orphans (abandoned samples) and canned answers: context only."""
    finish: FinishReason = "stop"
    cells: list[int] = []
    """Cells that produced the output, in order; more than one means the call was rerouted."""
    dialect: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    drift: dict[str, int] = {}
    """Differences between emitted and echoed history met while matching this call, by kind."""
    flags: list[str] = []
    """Things worth showing: "unparsed_tool_call", "replayed", …"""
    routing: ExpertRouting | UnsetType = UNSET
    """Experts at the position before each own token, delta and output: positions [prefix_len − 1, T − 1) of the call,
    from 0 for a root. Not stored when the run does not replay routing."""


class Validity(StrEnum):
    """Why an execution does or does not train (docs/outcomes.md)."""

    VALID = "valid"
    """A designated assessment exists; zero is a reward like any other."""
    UNRESOLVED = "unresolved"
    """Work exists but no valid assessment within the budget: out of loss and of group statistics."""
    NO_WORK = "no-work"
    """Complete failure without assessable work: dummy with zero reward, counts in the group, zero loss."""


class CallFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy saw of an execution's calls: it tells the platform's doing from the policy's."""

    answered: int = 0
    """Calls that the policy answered, those that were cut included."""
    cut: int = 0
    """Answers that ended at the token limit."""
    lost: int = 0
    """Calls that got no answer for a reason of the platform's, and that no later try of the harness got either."""


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one preserved state. Assessments never overwrite each other."""

    execution_id: str
    artifact: str
    """Reference of the assessed state: workspace path plus content digest."""
    evaluator: str
    score: float | None
    valid: bool
    version: str = ""
    """Of the evaluator: a hash of what it grades by."""
    branch: str = ""
    """Call id of the leaf whose state is assessed; "" is the state that the execution left."""
    designated: bool = True
    """Whether it decides the reward, by the rule of the configuration."""
    detail: dict[str, float] = {}
    """Named partial scores, when the evaluator gives them."""
    error: str = ""
    fault: Literal["", "grader", "task", "platform"] = ""
    """Why there is no score: the grader ran and gave none, cannot grade this task at all, or could not run."""
    flags: list[str] = []
    """Facts that a reader should see, such as signs of tampering (docs/outcomes.md)."""
    usage: dict[str, float] = {}
    """What a judge spent on it: tokens_read, tokens_written, cost."""
    seconds: float = 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The designated assessment of a closed execution, or why there is none."""

    execution_id: str
    validity: Validity
    reward: float
    """Meaningful when VALID; 0.0 for NO_WORK; ignored for UNRESOLVED."""
    cause: str
    """How the execution ended: a `runner.failures.Cause`."""
    assessment: Assessment | None = None
    harness_exit_code: int | None = None
    message: str = ""
    calls: CallFacts | None = None
    """None when nobody told them, as for an execution that was cancelled."""
    grading_s: float = 0.0
    """Seconds of all gradings."""
    waited_s: float = 0.0
    """Seconds for which they had to wait for a grader."""
    usage: dict[str, float] = {}
    """What judges spent on it: tokens_read, tokens_written, cost."""
    quarantine: str = ""
    """Why no execution of this task can be graded; "" when that is not known."""


class SessionAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How the harness of one execution reaches its session; path and key are unguessable."""

    path: str
    """URL path prefix, e.g. "/x/9fK…"; the base URL is http://host:port + path."""
    api_key: str
    socket: str = ""
    """Unix socket of the proxy worker that serves the session, for the sandbox; "" when it listens on none."""
