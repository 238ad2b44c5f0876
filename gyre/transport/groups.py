"""Raw process groups on a rendezvous store: NCCL for tensors on CUDA devices, gloo otherwise.

They are not registered with torch.distributed's world, so a broken one is dropped and forgotten. Whatever happens to
another member, this one sees an error of `wait` within the timeout and nothing else.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d


def make_group(store: c10d.Store, rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> Any:
    """Rank `rank` of `size`; gloo listens on `host`. Raises RuntimeError when the others do not come in time."""
    make = _nccl if device.type == "cuda" else _gloo
    return make(store, rank, size, host, timeout_s)


def _gloo(store: c10d.Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)


def _nccl(store: c10d.Store, rank: int, size: int, _: str, timeout_s: float) -> Any:
    """Usually torch's watchdog thread ends the process when another member dies; with blocking waits a group has none,
    and `wait` polls for errors of the peers, keeps its timeout and aborts the communicator. A communicator that does
    not block while it connects can be given up too."""
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    # Torch reads the one at the first use of such a communicator, the other when a group is made.
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(math.ceil(timeout_s))
    with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return nccl(store, rank, size, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
