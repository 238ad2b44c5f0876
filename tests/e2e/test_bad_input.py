"""Bad input ends the command with code 2 and one sentence, before any process or run directory exists."""

import shutil
import socket
import sys
from pathlib import Path

import pytest

from gyre.cli.main import main

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
QUICKSTART = str(EXAMPLES / "quickstart.toml")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("scheduler.cels=2", "scheduler.cels is not a known key; did you mean 'cells'"),
        ("scheduler.executions_per_group=many", "scheduler.executions_per_group: expected `int`, got `str`"),
        ("scheduler.extra_dispatch=0.3", "must be a whole number"),
        ("admission.trajectories_per_execution=0", "admission.trajectories_per_execution: expected `int` >= 1"),
        (
            "admission.trajectories_per_execution=many",
            "admission.trajectories_per_execution = 'many' must be one of: all",
        ),
        ("scheduler.executions_per_group=64", "one group must fit"),
        ("policy.model=nowhere", "has no config.json"),
        ("tasks.root=nowhere", "nowhere"),
        ("harness.name=nobody", "nobody"),
        ("engine.kv_blocks=4", "holds less than one context"),
        ("engine.max_batch_tokens=8", "engine.max_requests = 64 exceeds engine.max_batch_tokens = 8"),
        ("engine.page_size=2", "engine.page_size: expected `int` >= 4"),
        ("trainer.replay_routing=true", "trainer.replay_routing = true, but policy.model = "),
        ("policy.family=llama3", 'policy.family = "llama3" is not the family of policy.model = '),
        ("trainer.parallel.tensor=3", "trainer.parallel.tensor = 3 does not divide vocab_size = 1580"),
        ("trainer.parallel.pipeline=5", "4 layers"),
    ],
)
def test_bad_config_is_refused_in_one_sentence(
    override: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", QUICKSTART, override, "--run-dir", str(run)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not run.exists()


def test_an_override_counts_wherever_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", QUICKSTART, "--run-dir", str(tmp_path / "run"), "scheduler.muu=2", "scheduler.extra_dispatch=1"])
        == 2
    )
    assert "scheduler.muu is not a known key" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", QUICKSTART, "--run-dir", str(tmp_path / "run"), "--steps=2"])
    assert "unrecognized arguments: --steps=2" in capsys.readouterr().err


def test_colocate_with_extra_dispatch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "scheduler.mode=colocate",
        "scheduler.cells=1",
        "scheduler.pool_capacity=0",
        "scheduler.extra_dispatch=0.5",
    ]
    assert main(["train", QUICKSTART, *overrides, "--run-dir", str(tmp_path / "run")]) == 2
    assert "it must be 0" in capsys.readouterr().err


def test_a_model_in_several_files_is_accepted_and_one_that_cannot_be_trained_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (model / name).touch()
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["train", QUICKSTART, f"policy.model={model}", "--run-dir", str(tmp_path / "run")]) == 2
    assert f"{model}: model_type='gpt2' cannot be trained" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "["])
def test_a_file_that_is_no_tokenizer_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(EXAMPLES / "policy/tiny", tmp_path / "model")
    (model / "tokenizer.json").write_text(content)
    assert main(["train", QUICKSTART, f"policy.model={model}", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"the tokenizer of policy.model = {model} cannot be read" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("engine.python=/nowhere/python", "engine.python = /nowhere/python is no interpreter that has SGLang"),
        (f"engine.python={__file__}", "is no interpreter that has SGLang; name the one"),
        (f"engine.python={sys.executable}", "is no interpreter that has SGLang; name the one"),
        ("engine.dtype=int8", "engine.dtype = 'int8' must be one of: auto, half, float16, bfloat16, float, float32"),
        ("engine.tensor=3", "engine.tensor = 3 does not divide num_attention_heads = 4"),
        ("engine.device=cuda", "the engines run on GPUs and devices.ids lists none"),
    ],
)
def test_an_sglang_engine_that_cannot_start_is_refused(
    override: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _, after = Path(QUICKSTART).read_text().partition("[engine]")
    after = after[after.index("[trainer.optimizer]") :]
    config = tmp_path / "sglang.toml"
    config.write_text(f'{before}[engine]\nkind = "sglang"\npython = "python"\ndevice = "cpu"\n{after}')
    paths = [f"policy.model={EXAMPLES / 'policy/tiny'}", f"tasks.root={EXAMPLES / 'tasks'}"]
    assert main(["train", str(config), *paths, override, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_broken_task_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "tasks" / "lonely"
    task.mkdir(parents=True)
    (task / "task.toml").write_text("[agent\n")
    assert main(["train", QUICKSTART, f"tasks.root={task.parent}", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "lonely" in error
    assert error.count("\n") == 1


def test_a_missing_harness_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", QUICKSTART, f"harness.root={tmp_path}", "--run-dir", str(tmp_path / "run")]) == 2
    assert "claude" in capsys.readouterr().err


def test_a_machine_on_which_no_sandbox_can_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bwrap = tmp_path / "bwrap"
    script = (
        "[ $1 = --version ] && echo bubblewrap 0.9.0 && exit; echo no permissions to create a namespace >&2; exit 1"
    )
    bwrap.write_text(f"#!/bin/sh\n{script}\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["train", QUICKSTART, "--run-dir", str(tmp_path / "run")]) == 2
    assert "could not boot: no permissions to create a namespace; run as root" in capsys.readouterr().err


def test_a_taken_port_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["train", QUICKSTART, f"rollout.port={port}", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"rollout.port = {port} cannot be used" in error
    assert error.count("\n") == 1


def test_one_port_for_several_proxy_workers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["rollout.port=8000", "rollout.proxy_workers=2"]
    assert main(["train", QUICKSTART, *overrides, "--run-dir", str(tmp_path / "run")]) == 2
    assert "rollout.port = 8000 is one proxy worker's" in capsys.readouterr().err
