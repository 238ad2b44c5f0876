"""[engine] of a run's configuration chooses the engine and becomes its worker's config."""

from pathlib import Path

import msgspec
import pytest

from gyre.control.live.fleet.fleet import SENDER_ENTRY
from gyre.core.config import decode, dump
from gyre.core.errors import ConfigError
from gyre.engines.config import EngineConfig
from gyre.engines.local.config import LocalEngineConfig, LocalSection
from gyre.engines.section import EngineSection
from gyre.engines.sglang.config import SenderConfig, SglangEngineConfig, SglangSection
from gyre.launch.worker import load_entry
from gyre.transport.section import MooncakeSection, ShmSection


class File(msgspec.Struct, forbid_unknown_fields=True):
    engine: EngineSection = LocalSection()


def read(**engine) -> EngineSection:
    return decode({"engine": engine}, File, where="run.toml", base=Path("/")).engine


@pytest.mark.parametrize(
    ("section", "config_type"),
    [
        (LocalSection(kv_blocks=7, threads=2), LocalEngineConfig),
        (SglangSection(python="/x/python", tensor=2, args={"mem-fraction-static": 0.8}), SglangEngineConfig),
    ],
)
def test_a_section_becomes_the_config_of_its_worker(section, config_type):
    common = EngineConfig(
        model_dir="/model",
        transport_root="/dev/shm/x",
        transport=MooncakeSection(),
        max_context=64,
        seed=3,
        replay_routing=True,
    )
    config = section.worker_config(common)
    assert load_entry(section.entry)[1] is config_type is type(config)
    for name in common.__struct_fields__:
        assert getattr(config, name) == getattr(common, name)
    assert config.section == section


def test_a_broadcast_needs_a_sender_and_a_snapshot_none():
    section = SglangSection(python="p", weights="broadcast", sender_host="10.0.0.1", sender_gpu="7")
    section.require(64)
    assert load_entry(SENDER_ENTRY)[1] is SenderConfig
    found = section.sender_config("/dev/shm/x", MooncakeSection())
    assert found == SenderConfig(
        transport_root="/dev/shm/x", transport=MooncakeSection(), host="10.0.0.1", device="cuda"
    )
    assert SglangSection(python="p").sender_config("/dev/shm/x", ShmSection()) is None
    assert LocalSection().sender_config("/dev/shm/x", ShmSection()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"args": {"pp-size": 2}}, "pp-size = 2"),
        ({"args": {"data-parallel-size": 2}}, "data-parallel-size = 2"),
        ({"sender_gpu": "7", "device": "cpu"}, "engine.device"),
        ({"sender_gpu": "7", "weights": "snapshot"}, "engine.weights"),
    ],
)
def test_a_broadcast_that_cannot_work_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        SglangSection(**({"python": "p", "weights": "broadcast"} | changes)).require(64)


def test_kind_chooses_and_survives_the_effective_configuration():
    section = read(kind="sglang", python="/x/python", kv_tokens=9000)
    assert section == SglangSection(python="/x/python", kv_tokens=9000)
    assert 'kind = "sglang"' in dump(File(engine=section))
    assert read(kind="local", kv_blocks=9) == LocalSection(kv_blocks=9)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"kind": "llama"}, "llama"),
        ({"kind": "sglang"}, "python"),
        ({"kind": "local", "tensor": 2}, "tensor"),
        ({"kind": "local", "kv_blocks": 0}, "kv_blocks"),
        ({"kind": "sglang", "python": "p", "weights": "pigeon"}, "weights"),
    ],
)
def test_wrong_sections_are_refused_by_name(engine, reason):
    with pytest.raises(ConfigError, match=reason):
        read(**engine)


@pytest.mark.parametrize(
    ("section", "reason"),
    [(LocalSection(kv_blocks=3, page_size=16), "at least 4"), (SglangSection(python="p", kv_tokens=64), "at least 72")],
)
def test_memory_for_less_than_one_context_is_refused(section, reason):
    with pytest.raises(ConfigError, match=reason):
        section.require(64)
