"""A streaming 1F1B batch whose packs are all ready against Megatron's stock 1F1B on the same packs, two stages.

    python benchmarks/streaming_pipeline.py [--json OUT] [--packs 12] [--hidden 256]

"ratio_to_stock" is the median over interleaved repeats of streaming time / stock time, wall clock of the slower stage;
"cpu_ratio_to_stock" compares the CPU seconds of both stages, which a busy machine disturbs less. Also checks that both
give the same gradients.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from packed_tree import VOCABULARY
from stock_schedule import stock
from transformers import Qwen3Config

from gyre.samples.microstep import Row
from gyre.training.config import ParallelConfig, TrainerSection
from gyre.training.megatron import parallel
from gyre.training.megatron.forward_batch import ForwardBatch
from gyre.training.megatron.replica import Replica
from gyre.training.step.pipeline import Pipeline, Stage

STAGES = 2


def make_packs(replica: Replica, count: int) -> list[ForwardBatch]:
    """Packs of one row of 256–768 tokens, a third of them targets."""
    rng = random.Random(0)
    packs = []
    for _ in range(count):
        length = rng.randrange(256, 768)
        targets = sorted(rng.sample(range(1, length), length // 3))
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        row = Row(ids_T=ids, targets=targets, logprobs=[0.0] * len(targets), versions=[0] * len(targets))
        packs.append(replica.pack([row]))
    return packs


def streaming(replica: Replica, stage: Stage, packs: list[ForwardBatch]) -> None:
    pipeline: Pipeline[ForwardBatch] = Pipeline(stage, replica.forward)
    for pack in packs:
        pipeline.train(pack, replica.travelling(pack), torch.sum)
    pipeline.drain()


def run(rank: int, options: argparse.Namespace, directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", STAGES)
    layout = ParallelConfig(pipeline=STAGES)
    parallel.initialize(layout, rank, "cell", store)
    replica = Replica(f"{directory}/model", TrainerSection(parallel=layout))
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)
    packs = make_packs(replica, options.packs)
    stage = Stage(parallel.pipeline_group(), options.hidden, torch.float32, replica.model.device)
    ratios, cpu_ratios, gradients = [], [], []
    for repeat in range(options.repeats + 1):
        seconds, cpu_seconds = [], []
        for name in ("streaming", "stock"):
            replica.zero_gradients()
            dist.barrier()
            started, cpu_started = time.monotonic(), time.process_time()
            streaming(replica, stage, packs) if name == "streaming" else stock(replica, packs)
            dist.barrier()
            seconds.append(time.monotonic() - started)
            cpu_seconds.append(_sum(time.process_time() - cpu_started))
            if repeat == 0:
                gradients.append(replica.snapshot_gradients()[0])
        if repeat:
            ratios.append(seconds[0] / seconds[1])
            cpu_ratios.append(cpu_seconds[0] / cpu_seconds[1])
    difference = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    seen: list[Any] = [None] * STAGES
    dist.all_gather_object(seen, difference)
    if rank == 0:
        result = {
            "ratio_to_stock": statistics.median(ratios),
            "cpu_ratio_to_stock": statistics.median(cpu_ratios),
            "ratios": ratios,
            "cpu_ratios": cpu_ratios,
            "gradient_difference": max(seen),
        }
        print(json.dumps(result, indent=2))
        if options.json:
            options.json.write_text(json.dumps(result, indent=2))


def _sum(seconds: float) -> float:
    """Over the stages."""
    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--packs", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            num_key_value_heads=max(1, options.hidden // 128),
            head_dim=64,
            tie_word_embeddings=False,
        ).save_pretrained(f"{directory}/model")
        multiprocessing.set_forkserver_preload(["gyre.training.megatron.replica"])
        mp.start_processes(run, args=(options, directory), nprocs=STAGES, start_method="forkserver")


if __name__ == "__main__":
    main()
