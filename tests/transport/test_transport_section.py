"""[transport] of a run's configuration chooses the transport that every process of the run opens."""

import builtins
from pathlib import Path

import msgspec
import pytest
import torch

from gyre.core.config import decode, dump
from gyre.core.errors import ConfigError
from gyre.transport.section import MooncakeSection, ShmSection, TransportSection, open_transport, require
from gyre.transport.shm import ShmTransport


class File(msgspec.Struct, forbid_unknown_fields=True):
    transport: TransportSection = ShmSection()


def read(**transport) -> TransportSection:
    return decode({"transport": transport}, File, where="run.toml", base=Path("/")).transport


def test_kind_chooses_and_survives_the_effective_configuration():
    section = read(kind="mooncake", protocol="rdma", device="mlx5_0")
    assert section == MooncakeSection(protocol="rdma", device="mlx5_0")
    assert 'kind = "mooncake"' in dump(File(transport=section))
    assert read(kind="shm") == ShmSection()


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        ({"kind": "nccl"}, "nccl"),
        ({"kind": "shm", "host": "10.0.0.7"}, "host"),
        ({"kind": "mooncake", "stall_s": 0.0}, "stall_s"),
    ],
)
def test_wrong_sections_are_refused_by_name(transport, reason):
    with pytest.raises(ConfigError, match=reason):
        read(**transport)


def test_a_missing_package_is_one_sentence(monkeypatch):
    def without_mooncake(name, *args):
        if name.startswith("mooncake"):
            raise ImportError(f"No module named {name}")
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_mooncake)
    with pytest.raises(ConfigError, match=r'kind = "mooncake" needs .* \(No module named mooncake.engine\)'):
        require(MooncakeSection())
    require(ShmSection())


def test_every_process_publishes_in_a_directory_of_its_own(tmp_path):
    core, engine = (
        open_transport(ShmSection(), str(tmp_path), name, "127.0.0.1") for name in ("trainer-0", "engine-0")
    )
    assert isinstance(core, ShmTransport)
    assert core.root == tmp_path / "trainer-0"
    ref = core.publish(1, {"a": torch.ones(3)})
    engine.retire(set())
    assert engine.pull(ref)["a"].tolist() == [1.0, 1.0, 1.0]
