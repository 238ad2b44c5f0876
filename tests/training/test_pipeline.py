"""Streaming 1F1B on a toy model: gradients equal one process, pauses are harmless wherever they fall.

The ranks run many random schedules. At each pause point every rank waits for everything
that it has posted: a message that only a later command would match runs into the group timeout and fails the test.
"""

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from training_cases import rank_processes

from gyre.training.step.pipeline import Pipeline, Stage

HIDDEN, TIMEOUT_S = 6, 60.0


def layer(index: int) -> torch.nn.Module:
    torch.manual_seed(index)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()).double()


def pack(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 1, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(stages: int, packs: list[torch.Tensor]) -> list[torch.nn.Module]:
    """The layers of all stages in one process with the summed gradient of the packs."""
    layers = [layer(i) for i in range(stages)]
    for x in packs:
        for module in layers:
            x = module(x)
        x.square().sum().backward()
    return layers


def schedules() -> list[list[tuple[str, int]]]:
    """("train" or "score", tokens) per command; few packs, many packs, none."""
    fixed: list[list[tuple[str, int]]] = [[], [("train", 3)], [("score", 2)], [("train", n) for n in range(1, 10)]]
    rng = random.Random(5)
    kinds = ["train", "train", "score"]
    return fixed + [[(rng.choice(kinds), rng.randrange(1, 9)) for _ in range(rng.randrange(12))] for _ in range(6)]


def run_rank(rank: int, store: str) -> None:
    """Four processes: as two pipelines of two stages, then as one of four."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=timeout)
    for members in ([0, 1], [2, 3], [0, 1, 2, 3]):
        group = dist.new_group(members, timeout=timeout)
        if rank in members:
            run_schedules(Stage(group, HIDDEN, torch.float64, torch.device("cpu")), len(members))
    dist.destroy_process_group()


def run_schedules(stage: Stage, stages: int) -> None:
    for schedule in schedules():
        module = layer(stage.index)
        pipeline: Pipeline[torch.Tensor] = Pipeline(stage, feed(module))
        run_schedule(pipeline, schedule)
        pipeline.drain()
        trained = [pack(i, tokens) for i, (kind, tokens) in enumerate(schedule) if kind == "train"]
        expected = reference(stages, trained)[stage.index]
        for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
            assert (mine.grad is None) == (not trained)
            if mine.grad is not None:
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14), (schedule, stage.index)


def feed(module: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    return lambda x, activation: module(x if activation is None else activation)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def run_schedule(pipeline: Pipeline[torch.Tensor], schedule: list[tuple[str, int]]) -> None:
    in_flight = 0
    for i, (kind, tokens) in enumerate(schedule):
        if kind == "train":
            pipeline.train(pack(i, tokens), tokens, loss)
            in_flight = min(in_flight + 1, pipeline.stage.after)
        else:
            output = pipeline.score(pack(i, tokens), tokens)
            assert (output is not None) == (pipeline.stage.after == 0)
        assert len(pipeline._in_flight) == in_flight, "the pipeline stays full across pauses"
        wait_for_everything_posted(pipeline)


class Done:
    def wait(self) -> None:
        """Gloo allows one wait for a message."""


def wait_for_everything_posted(pipeline: Pipeline[torch.Tensor]) -> None:
    pipeline._settle()
    if pipeline._gradient is not None:
        work, gradient = pipeline._gradient
        work.wait()
        pipeline._gradient = (Done(), gradient)


def test_streaming_equals_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rank_processes()
    mp.start_processes(run_rank, args=(str(tmp_path / "store"),), nprocs=4, start_method="forkserver")


def test_one_stage_needs_no_neighbours(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = layer(0)
        pipeline: Pipeline[torch.Tensor] = Pipeline(
            Stage(dist.group.WORLD, HIDDEN, torch.float64, torch.device("cpu")), feed(module)
        )
        for i in range(3):
            pipeline.train(pack(i, 4), 4, loss)
        expected = reference(1, [pack(i, 4) for i in range(3)])[0]
        for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    finally:
        dist.destroy_process_group()
