"""A real SGLang server on the CPU under test, and what its weights must be."""

import contextlib
import hashlib
from pathlib import Path

import pytest
import torch
from contract import CONTEXT, Rig, tiny_model

from gyre.engines.sglang.client import SglangClient
from gyre.engines.sglang.config import SglangEngineConfig
from gyre.engines.sglang.engine import SglangEngine
from gyre.engines.sglang.server import serving
from gyre.engines.sglang.weights import ModelDirs
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
    sizes = {"kv_tokens": 8192, "max_context": CONTEXT, "stream_interval": 1}
    return SglangEngineConfig(model_dir=model_dir, transport_root=root, **(fixed | sizes | changes))


@contextlib.asynccontextmanager
async def running(config: SglangEngineConfig, private: Path):
    """Yields (rig, client) of an engine in this process over a server of its own."""
    transport = ShmTransport(config.transport_root)
    models = ModelDirs(config.model_dir, private / "models", transport)
    async with serving(config, models.serving(), private) as server:
        client = SglangClient(server.url, server.secret, control_timeout_s=60.0)
        engine = SglangEngine(client, models, config.max_context, control_timeout_s=60.0)
        yield Rig(engine, transport, grain=1, sees_kv=False), client
        await client.close()


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
