"""The search of `gyre plan`: a front of staleness against time per step, found within a budget of seconds.

Rounds: the neighbours of all settings on the front so far are simulated on `FEW` seeds, until a round finds nothing
that is new, or the budget ends. Then the front is measured again on seeds that chose nothing, so that its differences
to the planned configuration, paired by seed, are not the luck of the search.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import msgspec

from gyre.scheduling.config import SchedulerConfig
from gyre.simulation.planning.candidates import neighbours, staleness_of
from gyre.simulation.planning.world import World

PLAN_STEPS = 12
"""At least; whole bursts."""
FEW = (0, 1)
"""Seeds that settings are compared on."""
FRESH = 1000
"""First of the seeds that the front is measured on."""
LEAST = 2
"""Of them, also when the budget is over: an error bar needs two."""
SEARCH_SHARE = 0.6
"""Of the budget; the rest measures the front."""

Report = Callable[[str], None]


class Measured(msgspec.Struct, frozen=True):
    config: SchedulerConfig
    hours: list[float]
    """Per step, by seed."""

    @property
    def staleness(self) -> float:
        return staleness_of(self.config)

    @property
    def mean(self) -> float:
        return statistics.mean(self.hours)

    @property
    def error(self) -> float:
        """Standard error of `mean`."""
        return _error(self.hours)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    own: Measured
    front: list[Measured]
    """By staleness, ascending; each is faster than all that are fresher. On the same seeds as `own`."""
    tried: int
    """Settings, with the planned one."""
    complete: bool
    """False when the budget ended first."""
    seconds: float


def steps_of(config: SchedulerConfig) -> int:
    """Simulated: whole bursts."""
    return -(-PLAN_STEPS // config.steps_per_burst) * config.steps_per_burst


def hours_per_step(world: World, config: SchedulerConfig, seed: int) -> float:
    steps = steps_of(config)
    return world.run(msgspec.structs.replace(config, max_steps=steps), seed).step_ends[-1] / steps


def gain(one: Measured, base: Measured) -> tuple[float, float]:
    """Mean relative difference over common seeds, and its standard error."""
    pairs = [own / other - 1 for own, other in zip(one.hours, base.hours, strict=True)]
    return statistics.mean(pairs), _error(pairs)


def front_of(measured: Iterable[Measured]) -> list[Measured]:
    """Those that no other one beats in both staleness and mean time, by staleness."""
    found: list[Measured] = []
    for one in sorted(measured, key=lambda one: (one.staleness, one.mean)):
        if not found or one.mean < found[-1].mean:
            found.append(one)
    return found


def search(
    world: World, own: SchedulerConfig, *, staleness: float, budget_s: float, seeds: int, report: Report
) -> Plan:
    """The planned configuration and the front of at most `staleness`, on the same seeds: `seeds`, or as many as the
    budget allows."""
    started = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count() or 1, initializer=_worker, initargs=(world,)) as pool:
        measured, complete = _explore(pool, world.predicts, own, staleness, started + SEARCH_SHARE * budget_s, report)
        chosen = [own, *(one.config for one in front_of(measured.values()) if one.config != own)]
        hours: dict[SchedulerConfig, list[float]] = {config: [] for config in chosen}
        for i in range(seeds):
            until = started + budget_s if i >= LEAST else math.inf
            report(f"measuring {len(chosen)} settings: seed {i + 1} of {seeds}")
            done = _measure(pool, chosen, [FRESH + i], until, lambda *_: None)
            if len(done) < len(chosen):
                break
            for config, one in done.items():
                hours[config] += one.hours
    final = [Measured(config, values) for config, values in hours.items()]
    return Plan(
        own=final[0],
        front=front_of(one for one in final if one.staleness <= staleness),
        tried=len(measured),
        complete=complete,
        seconds=time.monotonic() - started,
    )


def _explore(
    pool: ProcessPoolExecutor, predicts: bool, own: SchedulerConfig, bound: float, until: float, report: Report
) -> tuple[dict[SchedulerConfig, Measured], bool]:
    measured = _measure(pool, [own], FEW, math.inf, lambda *_: None)
    expanded: set[SchedulerConfig] = set()
    while time.monotonic() < until:
        begin = [one.config for one in front_of(measured.values()) if one.config not in expanded]
        if own not in expanded:
            begin.append(own)
        expanded.update(begin)
        new = {other: None for one in begin for other in neighbours(one, own, bound, predicts)}
        todo = [config for config in new if config not in measured]
        if not todo:
            return measured, True

        known = f"searching: {len(measured)} settings, best {min(one.mean for one in measured.values()):.3g} h a step"

        def show(done: int, of: int, known: str = known) -> None:
            report(f"{known}; {done} of {of} runs of this round")

        measured |= _measure(pool, todo, FEW, until, show)
    return measured, False


def _measure(
    pool: ProcessPoolExecutor,
    configs: Sequence[SchedulerConfig],
    seeds: Sequence[int],
    until: float,
    show: Callable[[int, int], None],
) -> dict[SchedulerConfig, Measured]:
    """Those whose seeds were all simulated by `until`."""
    jobs: dict[Future[float], tuple[SchedulerConfig, int]] = {
        pool.submit(_simulated, config, seed): (config, seed) for config in configs for seed in seeds
    }
    waiting, done = set(jobs), 0
    while waiting and time.monotonic() < until:
        left = max(0.0, until - time.monotonic())
        finished, waiting = wait(waiting, None if math.isinf(left) else left, return_when=FIRST_COMPLETED)
        done += len(finished)
        show(done, len(jobs))
    hours: dict[SchedulerConfig, dict[int, float]] = {}
    for job, (config, seed) in jobs.items():
        if job.done() and not job.cancelled():
            hours.setdefault(config, {})[seed] = job.result()
        else:
            job.cancel()
    return {
        config: Measured(config, [of_seed[seed] for seed in seeds])
        for config, of_seed in hours.items()
        if len(of_seed) == len(seeds)
    }


_world: World
"""Of a worker process: sent once, not with every setting."""


def _worker(world: World) -> None:
    global _world
    _world = world


def _simulated(config: SchedulerConfig, seed: int) -> float:
    return hours_per_step(_world, config, seed)


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
