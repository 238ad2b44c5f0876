"""`gyre plan`: what a scheduler configuration means, in sentences. Pure."""

from gyre.scheduling.advice import advice
from gyre.scheduling.config import SchedulerConfig, capacity
from gyre.scheduling.staleness import expected_staleness


def explain(config: SchedulerConfig) -> str:
    """Paragraphs and a small table, for a configuration that `require` accepts."""
    parts = [_work(config), _capacity(config), _staleness(config), _training(config)]
    if config.mode != "async":
        parts.append(_join_table(config))
    parts += [f"Note: {sentence}" for sentence in advice(config)]
    return "\n\n".join(parts)


def _work(config: SchedulerConfig) -> str:
    executions = config.groups_per_step * config.executions_per_group
    bursts = -(-config.max_steps // config.steps_per_burst)
    lines = [
        f"One step trains B = {config.groups_per_step} groups of N = {config.executions_per_group} executions: "
        f"{executions} executions.",
        f"A burst is μ = {config.steps_per_burst} {_plural('step', config.steps_per_burst)} between two publications: "
        f"{config.steps_per_burst * config.groups_per_step} groups, {config.steps_per_burst * executions} executions.",
        f"The run takes {config.max_steps} {_plural('step', config.max_steps)} in {bursts} {_plural('burst', bursts)} "
        f"and saves a checkpoint {_every(config.checkpoint_every, 'burst')}.",
    ]
    return " ".join(lines)


def _capacity(config: SchedulerConfig) -> str:
    if config.mode == "async":
        most = config.pool_capacity
        where = f"the pool serves {most} executions at once, the training side none"
    else:
        most = capacity(config, 0)
        pool = f" and a pool of {config.pool_capacity}" if config.pool_capacity else ""
        cells = f"{config.cells} {_plural('cell', config.cells)}"
        where = f"{cells} of {config.cell_capacity}{pool} serve {most} executions at once"
    flight = config.depth * config.executions_per_group
    fits = "all of them run at once" if flight <= most else f"{flight - most} of them wait in the queue"
    refill = (
        f"Each publication dispatches {config.steps_per_burst * config.groups_per_step} new groups."
        if config.dispatch == "boundary"
        else "A group that becomes ready is replaced at once."
    )
    return (
        f"Capacity: {where}. At the start (φ+μ)·B = {config.depth} groups, {flight} executions, are dispatched; "
        f"{fits}. {refill}"
    )


def _staleness(config: SchedulerConfig) -> str:
    mean = expected_staleness(extra_dispatch=config.extra_dispatch, steps_per_burst=config.steps_per_burst)
    if config.dispatch == "continuous":
        return (
            f"Staleness: continuous dispatch gives φ + (μ−1)/2 + μ + R/B = {mean + config.steps_per_burst:g} + "
            f"R/{config.groups_per_step} versions on average, with R ready groups left at a publication."
        )
    return f"Staleness: φ + (μ−1)/2 = {mean:g} versions on average in the long run; the first steps are fresher."


def _training(config: SchedulerConfig) -> str:
    if config.mode == "async":
        return "Placement: fixed. " + _start(config)
    supply = (
        f"the waterlevel allows it (table) and {config.supply_groups:g} of the groups that the batch still needs have "
        f"been ready for {config.supply_wait_s:g} s"
    )
    room, burst = capacity(config, 1), config.steps_per_burst * config.groups_per_step * config.executions_per_group
    if burst > room:
        stays = f"The core returns to rollout after every burst: the next {burst} executions do not fit in {room}."
    else:
        stays = (
            f"The core stays in training after a burst when at most {room - burst} executions are still outstanding."
        )
    return f"Placement: the next cell joins training when {supply}. {_start(config)} {stays}"


def _start(config: SchedulerConfig) -> str:
    if config.streaming:
        return "Streaming: a batch starts on its first ready group."
    return (
        f"No streaming: a burst starts when all its {config.steps_per_burst * config.groups_per_step} groups are ready."
    )


def _join_table(config: SchedulerConfig) -> str:
    """What is outstanding must fit in the capacity that is left."""
    lines = ["cell   joins training when outstanding executions ≤"]
    shown = range(config.cells) if config.cells <= 12 else [*range(6), *range(config.cells - 6, config.cells)]
    for cell in shown:
        lines.append(f"{'core' if cell == 0 else cell:>4}   {capacity(config, cell + 1)}")
        if config.cells > 12 and cell == 5:
            lines.append("   …")
    return "\n".join(lines)


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _every(count: int, word: str) -> str:
    return f"after every {word}" if count == 1 else f"after every {count} {word}s"
