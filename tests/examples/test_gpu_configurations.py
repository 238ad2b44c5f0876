"""The configurations for machines with GPUs: as far as they can be checked where there are none."""

import json
from pathlib import Path

import pytest

from gyre.cli.main import main
from gyre.control.live.config import RunConfig
from gyre.control.live.fit import require_layout, require_servable
from gyre.control.live.preflight import settings
from gyre.control.live.preflight.subject import Subject
from gyre.control.live.preflight.tensors import parameters
from gyre.core import config as configs
from gyre.launch.section import RaySection
from gyre.training.models.families import read_architecture

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = {
    "node_8b": {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
        "num_key_value_heads": 8, "max_position_embeddings": 40960,
    },
    "cluster_30b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144,
        "num_key_value_heads": 4, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""What config.json of the models says: Qwen3-8B, Qwen3-30B-A3B."""
COMMON = {
    "num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
BILLIONS = {"node_8b": 8.19, "cluster_30b": 30.53}
"""Parameters, by the models' own pages."""
GIB = {"node_8b": (41, 74), "cluster_30b": (67, 131)}
"""Of a rank of the core, as the configuration says, and of one GPU with the memory that its first line names."""


@pytest.fixture(params=SHAPES)
def example(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, RunConfig]:
    (tmp_path / "config.json").write_text(json.dumps(COMMON | SHAPES[request.param]))
    changes = [f"policy.model={tmp_path}"]
    return request.param, configs.load(EXAMPLES / f"{request.param}.toml", changes, RunConfig)


def test_settings_are_accepted(example: tuple[str, RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for section in ("launch", "transport"):  # whether Ray and Mooncake are installed is the machine's affair
        monkeypatch.setattr(getattr(settings, section), "require", lambda _: None)
    settings.check(Subject(example[1]))
    assert not settings.notes(Subject(example[1]))
    assert example[1].admission.micro_step_tokens >= example[1].rollout.max_context


def test_the_model_can_be_split_and_served(example: tuple[str, RunConfig]) -> None:
    name, config = example
    model = read_architecture(json.loads((config.policy.model / "config.json").read_text()), name)
    require_layout(config.trainer.parallel, model, name)
    require_servable(config.engine, model, name)
    assert parameters(model) / 1e9 == pytest.approx(BILLIONS[name], abs=0.01)


def test_cells_take_the_gpus_that_the_first_lines_promise(example: tuple[str, RunConfig]) -> None:
    config = example[1]
    each = max(config.engine.gpus, config.trainer.parallel.ranks)
    if isinstance(config.launch, RaySection):
        assert (each, config.scheduler.cells) == (8, 4)
    else:
        assert each * config.scheduler.cells == len(config.devices.ids) == 8
        assert sum(len(ids) for ids in config.device_assignment().values()) == 8


def test_plan_says_what_they_mean_and_that_they_fit(
    example: tuple[str, RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, config = example
    needed, there = GIB[name]
    out = tmp_path / "memory.json"
    options = ["--device-gib", str(there), "--memory-json", str(out)]
    assert main(["plan", str(EXAMPLES / f"{name}.toml"), f"policy.model={config.policy.model}", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 versions on average" in said
    assert "Streaming: a batch starts on its first ready group." in said
    largest = max(stage["device"] for stage in json.loads(out.read_text())["core"])
    assert round(largest / 2**30) == needed
    assert f"{needed} GiB on each GPU of the core" in (EXAMPLES / f"{name}.toml").read_text()
