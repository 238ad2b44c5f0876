"""The runner of a node: starts sandboxes, drives harnesses, enforces budgets, evaluates preserved workspaces."""

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from gyre.core.records import CallFacts, Outcome, SessionAccess
from gyre.harnesses import HarnessProfile
from gyre.runner.failures import HarnessRun

Seconds = Annotated[float, Meta(gt=0)]


class Budgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Separate deadlines, in seconds (docs/outcomes.md). A harness timeout is scored; an overall timeout excludes."""

    boot_s: Seconds = 60.0
    harness_s: Seconds = 300.0
    evaluation_s: Seconds = 120.0
    overall_s: Seconds = 600.0
    """Waiting for a boot or a grader apart."""


class ExecutionSpec(msgspec.Struct, frozen=True, kw_only=True):
    execution_id: str
    task: str
    """Absolute path of the Harbor-format task directory."""
    harness: str
    access: SessionAccess
    budgets: Budgets = Budgets()


class HarnessOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to boot the sandbox of an execution and to run its harness there."""

    spec: ExecutionSpec
    profile: HarnessProfile
    """Whole: its name alone does not tell where a profile of the user's is."""
    attempt: int
    boot_timeout_s: float
    timeout_s: float
    """Of the harness."""


class ExecutionReport(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    workspace: str
    """Preserved workspace directory."""
    boot_s: float
    boot_waited_s: float
    """Seconds for which it had to wait for its boot."""
    harness_s: float


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """How a runner isolates executions: the content of the event `SandboxesOpened`."""

    provider: str
    limits: dict[str, str]
    weak: list[str]


class Runner(Protocol):
    async def isolation(self) -> Isolation: ...

    async def start(self, spec: ExecutionSpec) -> None:
        """Returns as soon as the execution is registered. A second start of the same id is ignored, so a controller
        that came back may repeat it."""
        ...

    async def wait_closed(self, execution_id: str) -> None:
        """Returns when the harness has ended (by itself, by its budget or by cancel), before it is graded."""
        ...

    async def wait(self, execution_id: str, calls: CallFacts) -> ExecutionReport:
        """Returns when the outcome is designated, from the work and from what the proxy saw: grading begins when the
        harness has ended and its `calls` are told. Never raises for anything the execution did."""
        ...

    async def cancel(self, execution_id: str) -> None:
        """Kills the sandbox tree; `wait` then returns an outcome with cause "cancelled"."""
        ...

    async def running(self) -> list[str]: ...


class Shim(Protocol):
    """Who holds the sandboxes."""

    async def boot(self, order: HarnessOrder) -> None:
        """Begins the attempt, unless it has begun, and returns when it no longer waits for a boot. An execution that
        another shim held is lost: `wait` says so."""
        ...

    async def wait(self, execution_id: str, attempt: int) -> HarnessRun:
        """Returns when the harness has ended and nothing of the sandbox runs."""
        ...

    async def cancel(self, execution_id: str) -> None:
        """Ends the sandbox."""
        ...
