"""A journal like that of a small elastic run: K cells, bursts of μ = 2 steps, satellites that join late."""

import random

from gyre.core.events import (
    CellJoined,
    CellLeft,
    Event,
    ExecutionClosed,
    ExecutionStarted,
    ExecutionTerminated,
    GroupDispatched,
    GroupReady,
    LedgerSampled,
    MicroStepDone,
    ProxySampled,
    PublicationProbed,
    Published,
    Role,
    RunFinished,
    RunStarted,
    StepDone,
    TransitionFinished,
    TransitionStarted,
)

K, B, N, MU, C_E = 3, 2, 4, 2, 8


def journal(steps: int = 12, seed: int = 0) -> list[Event]:
    """A complete run of `steps` optimizer steps; the reward rises from about 0.3 to about 0.8."""
    draw = random.Random(seed)
    events: list[Event] = []
    t = 0.0
    roles: list[Role] = ["rollout"] * K
    d = p = f = 0
    group = 0

    def emit(event: Event) -> None:
        events.append(event)

    def ledger() -> None:
        capacity = C_E * roles.count("rollout")
        emit(LedgerSampled(t=t, d=d, p=p, f=f, capacity=capacity, ready=0, roles=list(roles)))

    def move(cell: int, target: Role, seconds: float) -> None:
        nonlocal t
        source = roles[cell]
        emit(TransitionStarted(t=t, cell=cell, source=source, target=target, waterlevel=d - f, ready_groups=1))
        t += seconds
        roles[cell] = target
        calls = draw.randrange(4) if target == "training" else 0
        emit(
            TransitionFinished(
                t=t, cell=cell, source=source, target=target, calls_in_flight=calls, rerouted=calls, seconds=seconds
            )
        )
        ledger()

    def dispatch(version: int) -> None:
        nonlocal d, group
        for _ in range(MU * B):
            emit(GroupDispatched(t=t, group=group, query=f"task-{group % 3}", version=version))
            group += 1
            d += N
        ledger()

    def roll(groups: list[int], level: float) -> None:
        nonlocal t, p, f
        for g in groups:
            for member in range(N):
                p += 1
                emit(
                    ExecutionStarted(
                        t=t, execution_id=f"{g}-{member}", group=g, query=f"task-{g % 3}", harness="claude"
                    )
                )
            ledger()
            t += draw.uniform(2, 4)
            for member in range(N):
                f += 1
                reward = min(1.0, max(0.0, draw.gauss(level, 0.2)))
                emit(ExecutionTerminated(t=t, execution_id=f"{g}-{member}", group=g, seconds=3.0))
                emit(
                    ExecutionClosed(
                        t=t,
                        execution_id=f"{g}-{member}",
                        group=g,
                        validity="valid",
                        reward=reward,
                        cause="completed",
                        seconds=3.0,
                    )
                )
            emit(GroupReady(t=t, group=g))
            ledger()

    emit(RunStarted(t=0.0, run_id="synthetic"))
    t = 1.0
    dispatch(0)
    version = 0
    for burst in range(steps // MU):
        level = 0.3 + 0.5 * burst / max(1, steps // MU - 1)
        groups = list(range(burst * MU * B, (burst + 1) * MU * B))
        roll(groups[:B], level)
        for inner in range(MU):
            step = version + 1
            began = t
            if inner == 0:
                move(0, "training", 1.2)
                roll(groups[B:], level)
            emit(CellJoined(t=t, cell=0, step=step, version=version, late=False))
            batch = groups[inner * B : (inner + 1) * B]
            for index, g in enumerate(batch):
                t += 2.5
                cell = index if inner == 0 or index == 0 else 1
                emit(
                    MicroStepDone(
                        t=t, cell=cell, step=step, micro_step=f"g{g}", groups=[g], tokens=900, targets=300, seconds=2.4
                    )
                )
                if inner == 0 and index == 0:
                    move(1, "training", 0.8)
                    emit(CellJoined(t=t, cell=1, step=step, version=version, late=True))
            version += 1
            emit(
                StepDone(
                    t=t,
                    step=version,
                    groups=batch,
                    staleness=[inner] * B,
                    reward_mean=min(1.0, max(0.0, draw.gauss(level, 0.06))),
                    loss=-0.01,
                    grad_norm=0.4,
                    cells=[0, 1],
                    logprob_gap_count=300 if inner == 0 else 0,
                    logprob_gap_mean=2e-6,
                    logprob_gap_max=4e-5,
                    clipped_executions=1,
                    executions=B * N,
                    targets=600,
                    seconds=t - began,
                )
            )
            emit(
                ProxySampled(
                    t=t, calls=40 * version, prompt_mismatches=0, harness_errors_from_transitions=0, retries=version
                )
            )
        emit(CellLeft(t=t, cell=1, step=version, micro_steps=2))
        emit(Published(t=t, version=version, seconds=0.4))
        emit(PublicationProbed(t=t, version=version, cell=2, tokens=12, logprob_gap_max=3e-6))
        if burst < steps // MU - 1:
            dispatch(version)
        move(1, "rollout", 0.9)
        move(0, "rollout", 1.0)
    emit(RunFinished(t=t, reason="completed"))
    return events
