"""Fixtures of the training plane; what they are made of is in training_cases.py."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from training_cases import make_model, trainer_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from gyre.training.megatron import parallel
from gyre.training.trainer import MegatronTrainer
from gyre.transport.rendezvous import StoreServer
from gyre.transport.shm import ShmTransport


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "qwen3-tied"
    make_model("qwen3-tied", directory)
    return str(directory)


@pytest.fixture(scope="session")
def hf_model(model_dir: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("moe")
    make_model("qwen3-moe-mixed-4-layers", directory)
    return str(directory)


@pytest.fixture(scope="session")
def moe(moe_dir: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)


@pytest.fixture(scope="session")
def store() -> StoreServer:
    return StoreServer("127.0.0.1")


Factory = Callable[..., MegatronTrainer]


@pytest.fixture
def make_trainer(model_dir: str, store: StoreServer, tmp_path: Path) -> Iterator[Factory]:
    """Builds trainers in this process, one at a time: a new one takes the place of the one before."""
    made = 0

    def make(cell: int = 0, **changes: object) -> MegatronTrainer:
        nonlocal made
        if made:
            parallel.shutdown()
        made += 1
        config = trainer_config(cell, changes.pop("model_dir", model_dir), str(tmp_path / "weights"), store, **changes)
        return MegatronTrainer(config, ShmTransport(config.transport_root))

    yield make
    if made:
        parallel.shutdown()
