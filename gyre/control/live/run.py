"""One live run, from the effective configuration to the end of the last process."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec import json

from gyre.control.base import EssentialLost
from gyre.control.controller import Controller
from gyre.control.live.cells import LiveCells
from gyre.control.live.config import RunConfig
from gyre.control.live.executions import LiveExecutions
from gyre.control.live.launching import open_launcher
from gyre.control.live.materializer import LiveMaterializer
from gyre.control.live.processes import Fleet
from gyre.control.live.progress import POLLS, EngineWatch
from gyre.control.live.queries import ShuffledQueries
from gyre.control.state import FRESH, ControlState, ControlView, resume_state
from gyre.core.clock import SystemClock
from gyre.core.errors import GyreError, PeerLost
from gyre.core.events import Event, ProcessLost, ProxySampled, RunFinished, RunStarted, StepDone
from gyre.proxy.base import ProxyControl
from gyre.store import RunDir, RunStore
from gyre.store.rundir import Checkpoint
from gyre.tasks import load_tasks
from gyre.training.base import MicroStep
from gyre.transport.rendezvous import StoreServer

VIEW_INTERVAL_S = 0.5
END_SEEN_S = 1.0
"""Between a broken connection and the news that the process has ended."""
ANSWER_S = 10.0
"""After a broken connection, for a process that has not ended."""

OnView = Callable[[ControlView], None]


class _Vocabulary(msgspec.Struct):
    vocab_size: int


class StoreJournal:
    """Events go to the run store; `stepped` tells the sampler of proxy counters that a step is done."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self.stepped = asyncio.Event()

    def write(self, event: Event) -> None:
        self._store.append(event)
        if isinstance(event, StepDone):
            self.stepped.set()


async def run(config: RunConfig, run_dir: RunDir, resume_from: Checkpoint | None, on_view: OnView) -> None:
    """Trains until the configured step. Cancel it to interrupt: executions end first, then every process.

    `resume_from` is the checkpoint that a resumed run goes on from; None is a fresh start. When the core's trainer, the
    proxy or the runner is lost, the run goes back to its last checkpoint by itself, once per checkpoint. Raises the
    first failure that this does not repair.
    """
    store = run_dir.open_store()
    clock = SystemClock()
    journal = StoreJournal(store)
    went_back_to: set[int] = set()
    try:
        while True:
            try:
                await _run(config, run_dir, resume_from, store, clock, journal, on_view)
                break
            except EssentialLost as error:
                resume_from = run_dir.latest_checkpoint()
                version = resume_from.version if resume_from else 0
                if version in went_back_to:
                    raise GyreError(
                        f"{error}; the run has gone back to version {version} before: remove the cause, "
                        f"then continue with gyre train --resume {run_dir.root}"
                    ) from error
                went_back_to.add(version)
    except asyncio.CancelledError:
        journal.write(RunFinished(t=clock.now(), reason="interrupted"))
        raise
    except BaseException as error:
        journal.write(RunFinished(t=clock.now(), reason="failed", detail=str(error)))
        raise
    else:
        journal.write(RunFinished(t=clock.now(), reason="completed"))
    finally:
        store.close()


async def _run(
    config: RunConfig,
    run_dir: RunDir,
    resume_from: Checkpoint | None,
    store: RunStore,
    clock: SystemClock,
    journal: StoreJournal,
    on_view: OnView,
) -> None:
    """From one (re)start to the end of all its processes. Raises EssentialLost when it must start again."""
    state = resume_state(store.events(), store.outcomes(), resume_from.version if resume_from else 0)
    state = state if resume_from or state.next_group else FRESH
    journal.write(
        RunStarted(t=clock.now(), run_id=run_dir.root.name, resumed_from=None if state is FRESH else state.version)
    )
    async with open_launcher(config, run_dir) as launcher:
        rendezvous = StoreServer(launcher.host)
        fleet = Fleet(launcher, config, run_dir, rendezvous.address)
        try:
            await fleet.start()
            await _train(config, run_dir, resume_from, state, fleet, store, clock, journal, on_view)
        except (PeerLost, EssentialLost) as error:
            # Whoever noticed it: the end of the proxy or the runner is told once, here.
            loss = await _essential_loss(fleet)
            if loss is None:
                raise
            name, detail = loss
            journal.write(ProcessLost(t=clock.now(), name=name, detail=detail))
            raise EssentialLost(detail) from error
        finally:
            await fleet.close()


async def _train(
    config: RunConfig,
    run_dir: RunDir,
    resume_from: Checkpoint | None,
    state: ControlState,
    fleet: Fleet,
    store: RunStore,
    clock: SystemClock,
    journal: StoreJournal,
    on_view: OnView,
) -> None:
    tasks = {task.name: task.path for task in load_tasks(config.tasks.root)}
    vocabulary = json.decode((config.policy.model / "config.json").read_bytes(), type=_Vocabulary).vocab_size
    cells = LiveCells(fleet, run_dir, config, vocabulary)
    await cells.start(resume_from.path if resume_from else None)
    controller: Controller[MicroStep] = Controller(
        config.scheduler,
        clock,
        ShuffledQueries(list(tasks), config.seed),
        LiveExecutions(
            fleet.proxy,
            fleet.runner,
            tasks,
            config.harness.name,
            config.harness.budgets,
            most_idle=config.scheduler.B * config.scheduler.N,
        ),
        LiveMaterializer(
            store,
            state,
            j_max=None if config.admission.J_max == "all" else config.admission.J_max,
            budget_tokens=config.admission.micro_step_tokens,
            replicas=config.trainer.parallel.data,
            share_prefixes=config.trainer.share_prefixes,
            seed=config.seed,
        ),
        cells,
        journal,
        initial=state,
        limits=config.limits(),
        lanes=config.trainer.parallel.pipeline,
    )
    await _first_of(
        controller.run(),
        _watch(fleet),
        _end_silent(fleet, clock, config.recovery.stall_s),
        EngineWatch(fleet, clock, config.recovery.stall_s).run(),
        _show(controller, on_view),
        _sample_proxy(fleet.proxy, journal, clock),
    )
    on_view(controller.view())
    await _write_proxy_counters(fleet.proxy, journal, clock)


async def _first_of(main: Coroutine[Any, Any, None], *watchers: Coroutine[Any, Any, None]) -> None:
    """Runs them side by side until one returns or fails; that ends the others, and its failure is raised. `main` ends
    first: what it waits for in its end may hang, and a watcher see to it."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in (main, *watchers)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        tasks[0].cancel()
        try:
            await asyncio.wait(tasks[:1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(fleet: Fleet) -> None:
    """Never returns; raises when a process has ended that the run cannot do without."""
    _, detail = await fleet.essential_end()
    raise EssentialLost(detail)


async def _end_silent(fleet: Fleet, clock: SystemClock, stall_s: float) -> None:
    """Never returns. A process that hangs is ended, which `_watch` sees."""
    while True:
        await clock.sleep(stall_s / POLLS)
        await fleet.end_silent(stall_s)


async def _essential_loss(fleet: Fleet) -> tuple[str, str] | None:
    """Which proxy worker or runner has just ended or hangs, and how; None when the trouble is elsewhere."""
    ended = await _just_ended(fleet)
    if ended is None:
        await fleet.end_silent(ANSWER_S)
        ended = await _just_ended(fleet)
    return ended


async def _just_ended(fleet: Fleet) -> tuple[str, str] | None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SEEN_S):
            return await fleet.essential_end()
    return None


async def _show(controller: Controller[MicroStep], on_view: OnView) -> None:
    while True:
        on_view(controller.view())
        await asyncio.sleep(VIEW_INTERVAL_S)


async def _sample_proxy(proxy: ProxyControl, journal: StoreJournal, clock: SystemClock) -> None:
    while True:
        await journal.stepped.wait()
        journal.stepped.clear()
        await _write_proxy_counters(proxy, journal, clock)


async def _write_proxy_counters(proxy: ProxyControl, journal: StoreJournal, clock: SystemClock) -> None:
    stats = await proxy.stats()
    journal.write(
        ProxySampled(
            t=clock.now(),
            calls=stats.calls_done,
            prompt_mismatches=stats.prompt_mismatches,
            harness_errors_from_transitions=stats.harness_errors_from_transitions,
            retries=stats.retries,
        )
    )
    if stats.prompt_mismatches:
        raise GyreError(f"an engine answered {stats.prompt_mismatches} calls for other prompt ids than were sent")
