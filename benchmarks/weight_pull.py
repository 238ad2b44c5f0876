"""Pull of 500 MB of weights between two local processes, against a plain copy out of shared memory.

    python benchmarks/weight_pull.py [--mb 500] [--repeats 7] [--json OUT]

One process publishes, another one pulls a version it has not seen: "pull" ends with verified tensors, "pull_into" with
verified tensors copied into parameters that exist, "copy" with the same number of bytes in memory that exists.
Variants take turns; ratios are medians of the ratios of one turn. With Mooncake on PYTHONPATH (`scripts/mooncake.sh`)
its TCP pull runs too, in a network namespace when this is root: its listeners are on every interface.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import torch

from gyre.transport.base import WeightRef, WeightTransport
from gyre.transport.section import MooncakeSection, ShmSection, open_transport

SECTIONS = {"shm": ShmSection(), "mooncake": MooncakeSection()}
MB = 1 << 20
TENSORS = 50


def weights(version: int, mb: int) -> dict[str, torch.Tensor]:
    rows = mb * MB // 4 // TENSORS // 1024
    return {f"layers.{i}.weight": torch.full((rows, 1024), float(version * 1000 + i)) for i in range(TENSORS)}


def publish(kinds: list[str], root: str, mb: int, pipe: Connection) -> None:
    """The publisher's process: a new version of every kind, and one shared block, per turn."""
    torch.set_num_threads(1)
    transports = {kind: open_transport(SECTIONS[kind], root, f"{kind}-publisher", "127.0.0.1") for kind in kinds}
    while (version := pipe.recv()) is not None:
        tensors = weights(version, mb)
        block = SharedMemory(create=True, size=mb * MB)
        np.frombuffer(block.buf, np.uint8)[:] = version % 251
        pipe.send(({kind: each.publish(version, tensors) for kind, each in transports.items()}, block.name))
        pipe.recv()
        for each in transports.values():
            each.retire(set())
        block.close()
        block.unlink()


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of this process's CPU time, which other processes disturb less."""
    started, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - started, time.process_time() - cpu


def copy(name: str, target: np.ndarray) -> None:
    block = SharedMemory(name=name, track=False) if sys.version_info >= (3, 13) else SharedMemory(name=name)
    source = np.frombuffer(block.buf, np.uint8)
    np.copyto(target, source)
    del source
    block.close()


def pull_into(transport: WeightTransport, ref: WeightRef, parameters: dict[str, torch.Tensor]) -> None:
    for name, tensor in transport.pull(ref).items():
        parameters[name].copy_(tensor)


def measure(kinds: list[str], mb: int, repeats: int) -> dict[str, object]:
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        publisher = context.Process(target=publish, args=(kinds, root, mb, theirs))
        publisher.start()
        readers = {kind: open_transport(SECTIONS[kind], root, f"{kind}-reader", "127.0.0.1") for kind in kinds}
        parameters = weights(0, mb)
        target = np.ones(mb * MB, np.uint8)
        # The first turn warms up.
        for turn in range(repeats + 1):
            pipe.send(turn + 1)
            refs, block = pipe.recv()
            variants = {
                "copy": lambda block=block: copy(block, target),
                "pull_into": lambda refs=refs: pull_into(readers["shm"], refs["shm"], parameters),
            } | {f"pull_{kind}": lambda kind=kind, refs=refs: readers[kind].pull(refs[kind]) for kind in kinds}
            names = list(variants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                spent = timed(variants[name])
                if turn:
                    seconds.setdefault(name, []).append(spent)
            pipe.send("done")
        pipe.send(None)
        publisher.join()

    def ratio(name: str, kind: int = 0) -> float:
        return statistics.median(a[kind] / b[kind] for a, b in zip(seconds[name], seconds["copy"], strict=True))

    result: dict[str, object] = {
        "mb": mb,
        "repeats": repeats,
        "seconds": {name: statistics.median(wall for wall, _ in values) for name, values in seconds.items()},
        "ratio_to_shm_copy": ratio("pull_shm"),
        "ratio_to_shm_copy_cpu_time": ratio("pull_shm", 1),
        "ratio_pull_into_parameters": ratio("pull_into"),
    }
    if "mooncake" in kinds:
        result["ratio_mooncake_tcp"] = ratio("pull_mooncake")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = ["shm", "mooncake"] if find_spec("mooncake") else ["shm"]
    isolated = "GYRE_ISOLATED" in os.environ
    if "mooncake" in kinds and os.geteuid() == 0 and not isolated:
        again = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        sys.exit(subprocess.run(again, env=os.environ | {"GYRE_ISOLATED": "1"}).returncode)
    result = measure(kinds, options.mb, options.repeats)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
