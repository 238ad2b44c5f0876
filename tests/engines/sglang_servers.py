"""A real SGLang server on the CPU under test, and what its weights must be."""

import contextlib
import hashlib
import uuid
from pathlib import Path

import pytest
import torch
from contract import CONTEXT, Rig, tiny_model

from gyre.engines.sglang.broadcast import Broadcast
from gyre.engines.sglang.client import SglangClient
from gyre.engines.sglang.config import SenderConfig, SglangEngineConfig, SglangSection
from gyre.engines.sglang.engine import SglangEngine
from gyre.engines.sglang.publication import FromDisk, WeightUpdate
from gyre.engines.sglang.sender import Sender, WeightSender
from gyre.engines.sglang.server import serving
from gyre.engines.sglang.weights import ModelDirs
from gyre.launch.base import ProcessSpec, encode_config
from gyre.launch.local import LocalLauncher
from gyre.rpc import connect
from gyre.transport.shm import ShmTransport
from gyre.transport.state import published_state

PYTHON = Path(__file__).parents[2] / ".cache/sglang/venv/bin/python"
needs_sglang = pytest.mark.skipif(not PYTHON.is_file(), reason="SGLang for CPUs is not set up; run `make sglang`")


def save_tiny_model(path: Path) -> str:
    # Weights that no test publishes: an engine that answers with these shows it.
    tiny_model(seed=99).save_pretrained(path)
    return str(path)


def cpu_config(model_dir: str, root: str, **changes) -> SglangEngineConfig:
    fixed = {"python": str(PYTHON), "device": "cpu", "dtype": "float32"}
    sizes = {"kv_tokens": 8192, "max_context": CONTEXT, "stream_interval": 1, "seed": 0}
    fields = fixed | sizes | changes
    section = {
        name: fields.pop(name) for name in SglangSection.__struct_fields__ if name in fields and name != "weights"
    }
    return SglangEngineConfig(model_dir=model_dir, transport_root=root, **fields, section=SglangSection(**section))


BUCKET = 100_000
"""Bytes: the tiny model has several buckets, and a tensor that is larger than one."""


def publication(
    way: str, client: SglangClient, models: ModelDirs, transport: ShmTransport, ranks: int = 1, timeout_s: float = 60.0
) -> WeightUpdate:
    """`way` is "snapshot", or "broadcast" with a sender in this process."""
    if way == "snapshot":
        return FromDisk(client, models, transport)
    config = SenderConfig(transport_root=str(transport.root), bucket_bytes=BUCKET, step_timeout_s=timeout_s)
    return Broadcast(client, models, Sender(config, transport), ranks, timeout_s)


class SenderProcess:
    """`WeightSender` in a process; `start` puts a new one in the place of the last."""

    def __init__(self, config: SenderConfig, launcher: LocalLauncher, closing: contextlib.AsyncExitStack) -> None:
        self._config = config
        self._launcher = launcher
        self._closing = closing

    async def start(self) -> None:
        spec = ProcessSpec(
            name=f"sender-{uuid.uuid4().hex[:8]}",
            entry="gyre.engines.sglang.sender:main",
            config=encode_config(self._config),
        )
        self.process = await self._launcher.start(spec)
        connection = connect(WeightSender, self.process.address, self._launcher.secret)
        self._closing.push_async_callback(connection.close)
        self._stub = connection.stub

    def __getattr__(self, name: str):
        return getattr(self._stub, name)


@contextlib.asynccontextmanager
async def running(config: SglangEngineConfig, private: Path, way: str = "snapshot"):
    """Yields (rig, client) of an engine in this process over a server of its own."""
    transport = ShmTransport(config.transport_root)
    models = ModelDirs(config.model_dir, private / "models")
    async with serving(config, models.serving(), private) as server:
        client = SglangClient(server.url, server.secret, control_timeout_s=60.0)
        path = publication(way, client, models, transport, config.section.tensor)
        engine = SglangEngine(client, models, path, config.max_context, control_timeout_s=60.0)
        yield Rig(engine, transport, grain=1, sees_kv=False), client
        await client.aclose()


def server_parameters(model: torch.nn.Module, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The parameters that rank `rank` of `ranks` must hold, in SGLang's names and fused layout of Qwen3."""
    state = published_state(model)
    fused = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    held = {}
    for name, tensor in state.items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if leaf in ("o_proj", "down_proj"):
            held[name] = tensor.chunk(ranks, dim=1)[rank]
        elif leaf == "embed_tokens":
            held[name] = vocabulary_part(tensor, rank, ranks)
        elif not leaf.endswith("_proj"):
            held[name] = tensor
    for layer in range(model.config.num_hidden_layers):
        for whole, parts in fused.items():
            block = whole.split(".")[0]
            slices = [state[f"model.layers.{layer}.{block}.{part}.weight"].chunk(ranks)[rank] for part in parts]
            held[f"model.layers.{layer}.{whole}.weight"] = torch.cat(slices)
    return held


def vocabulary_part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """SGLang pads the vocabulary with zeros to a multiple of 64."""
    whole = torch.zeros(-(-len(tensor) // 64) * 64, tensor.shape[1])
    whole[: len(tensor)] = tensor
    return whole.chunk(ranks)[rank]


def checksums(parameters: dict[str, torch.Tensor]) -> dict[str, str]:
    """As `/weights_checker` gives them on a CPU."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()[:16]
        for name, tensor in parameters.items()
    }
