"""A run directory that every writer has put hostile text into, where the formats let it."""

from pathlib import Path

import msgspec
from synthetic_journal import journal
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gyre.core.events import (
    Event,
    ExecutionClosed,
    ExecutionStarted,
    ExecutionTerminated,
    InvariantBroken,
    ProcessLost,
    RunStarted,
)
from gyre.core.records import Assessment, CallRecord, Outcome, RoleClass, Validity
from gyre.store import RunDir

HOSTILE = "</td></pre><script>alert('1')</script><img src=x onerror=\"alert(2)\">$\\frac{&amp;\x1b[31m\u202e{{ 7*7 }}"
SCHEDULER = """[scheduler]
groups_per_step = 2
executions_per_group = 4
steps_per_burst = 2
extra_dispatch = 1.0
cells = 3
cell_capacity = 8
supply_wait_s = 5.0
max_steps = 4
"""


def call(
    seq: int,
    parent: int | None,
    role: RoleClass = RoleClass.MAIN,
    *,
    shared: int = 0,
    new: tuple[int, ...] = (0, 1),
    execution_id: str = "0-0",
) -> CallRecord:
    return CallRecord(
        execution_id=execution_id,
        call_id=f"c{seq}",
        seq=seq,
        parent=None if parent is None else f"c{parent}",
        prefix_len=shared,
        delta_ids=list(new),
        output_ids=[2, 3],
        output_logprobs=[-0.5] * 2,
        output_versions=[0, 1],
        role=role,
        cells=[1, 0],
        agent_id=HOSTILE if role is RoleClass.SUB_AGENT else "",
        dialect=HOSTILE,
        flags=[HOSTILE],
        drift={HOSTILE: 2},
    )


CALLS = [
    call(0, None),
    call(1, 0, shared=4),
    call(2, 0, shared=3),
    call(3, 1, shared=8),
    call(4, None, RoleClass.SUB_AGENT),
    msgspec.structs.replace(call(5, 3, shared=12), trainable=False),
]


def hostile_events() -> list[Event]:
    return [
        RunStarted(t=0.0, run_id=HOSTILE, resumed_from=4),
        ExecutionStarted(t=1.0, execution_id="9-0", group=99, query=HOSTILE, harness=HOSTILE),
        ExecutionTerminated(t=2.0, execution_id="9-0", group=99, seconds=1.0),
        ExecutionClosed(
            t=2.0,
            execution_id="9-0",
            group=99,
            validity="no-work",
            reward=0.0,
            cause=HOSTILE,
            seconds=1.0,
            message=HOSTILE,
        ),
        ExecutionStarted(t=2.0, execution_id="9-1", group=99, query="q", harness="h"),
        ProcessLost(t=3.0, name=HOSTILE, detail=HOSTILE),
        InvariantBroken(t=3.0, name=HOSTILE, detail=HOSTILE),
    ]


def make_run(root: Path) -> RunDir:
    """Four steps, then a resumption; "0-0" has six calls in four lines, "9-1" still runs."""
    policy = root.parent / "policy"
    policy.mkdir()
    words = {HOSTILE: 0, "beta": 1, "gamma": 2, "delta": 3}
    Tokenizer(WordLevel(words, unk_token="beta")).save(str(policy / "tokenizer.json"))
    run = RunDir.create(root, f'[policy]\nmodel = "{policy}"\n{SCHEDULER}# {HOSTILE!a}\n')
    assessment = Assessment(
        execution_id="0-0",
        artifact="w",
        evaluator=HOSTILE,
        score=0.75,
        valid=True,
        detail={HOSTILE: 0.5},
        error=HOSTILE,
    )
    with run.open_store() as store:
        for event in [*journal(4), *hostile_events()]:
            store.append(event)
        for record in CALLS:
            store.put_record(record)
        store.put_assessment(assessment)
        store.put_outcome(
            Outcome(
                execution_id="0-0",
                validity=Validity.VALID,
                reward=0.75,
                cause=HOSTILE,
                assessment=assessment,
                message=HOSTILE,
            )
        )
    return run
