"""Settings that are legal and useless: what the rules make of them, one sentence each. Pure.

`gyre plan` and preflight print them; nothing is refused. `config.problems` has what cannot run at all.
"""

from gyre.scheduling.config import SchedulerConfig, capacity
from gyre.scheduling.order import launches_in, waves


def advice(config: SchedulerConfig) -> list[str]:
    """Sentences on a configuration that `require` accepts; none when every setting does something."""
    return [*_groups(config), *_placement(config), *_capacity(config), *_order(config), *_run(config)]


def _groups(config: SchedulerConfig) -> list[str]:
    if config.executions_per_group > 1:
        return []
    return [
        "scheduler.executions_per_group = 1: the advantage of an execution is relative to its group, so a group of one "
        "never has a training signal; use at least 2."
    ]


def _placement(config: SchedulerConfig) -> list[str]:
    if config.mode == "async":
        return _fixed(config)
    found: list[str] = []
    batch, flight = config.groups_per_step, _in_flight(config)
    if config.cells > 1 and config.supply_groups > batch - 1:
        found.append(
            f"scheduler.min_supply = {config.min_supply:g}: no satellite ever joins, because a cell may join only "
            f"while the batch still has to take {config.supply_groups:g} groups, and the core takes the first of "
            f"{batch} at once; use at most {(batch - 1) / batch:.3g}, for example 0.125."
        )
    if config.mode == "elastic" and config.cells == 1 and not config.pool_capacity:
        extra = round(config.extra_dispatch * batch)
        wasted = f", and the {extra} groups of extra_dispatch only make it wait" if extra else ""
        found.append(
            "scheduler.cells = 1 with mode elastic and no pool: the only cell trains only when no execution is left, "
            f"so nothing overlaps{wasted}; use more cells, or a pool."
        )
    if config.mode != "colocate" and config.pool_capacity >= flight:
        found.append(
            f"scheduler.pool_capacity = {config.pool_capacity} serves all {flight} executions that can be in flight, "
            "so the cells serve nothing and only train; use mode async, or a smaller pool."
        )
    if config.mode == "elastic" and not config.streaming:
        found.append(
            "scheduler.streaming = false with mode elastic: cells join while groups become ready, but the first batch "
            f"of a burst takes none before all {config.steps_per_burst * batch} are ready; use streaming = true."
        )
    return found


def _fixed(config: SchedulerConfig) -> list[str]:
    if not config.cell_capacity:
        return []
    return [
        f"scheduler.cell_capacity = {config.cell_capacity} with mode async: cells of a fixed partition never serve "
        "executions, so the value has no effect."
    ]


def _in_flight(config: SchedulerConfig) -> int:
    return config.depth * config.executions_per_group


def _capacity(config: SchedulerConfig) -> list[str]:
    most = config.pool_capacity if config.mode == "async" else capacity(config, 0)
    flight = _in_flight(config)
    if most <= flight:
        return []
    return [
        f"The rollout capacity of {most} is never full: at most {flight} executions are in flight, so {most - flight} "
        "places stay empty."
    ]


def _order(config: SchedulerConfig) -> list[str]:
    if launches_in(config) == config.launch_order:
        return []
    count = waves(config)
    why = (
        "nearly all executions of a dispatched set start at once"
        if count < 2
        else "the order inside a set hardly moves when its last execution ends"
    )
    return [
        f"scheduler.launch_order = {config.launch_order} launches in the order of dispatch here: the executions in "
        f"flight fill the rollout capacity {count:.1f} times, and {why}. Of the ready groups the lightest still trains "
        "first."
    ]


def _run(config: SchedulerConfig) -> list[str]:
    found: list[str] = []
    if config.steps_per_burst > config.max_steps:
        found.append(
            f"scheduler.steps_per_burst = {config.steps_per_burst} is more than max_steps = {config.max_steps}: the "
            "weights are published once, when the run is over."
        )
    bursts = -(-config.max_steps // config.steps_per_burst)
    if config.checkpoint_every > bursts > 1:
        found.append(
            f"scheduler.checkpoint_every = {config.checkpoint_every} is more than the {bursts} bursts of the run: only "
            "its end is saved, and an interrupted run begins anew."
        )
    return found
