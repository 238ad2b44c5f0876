"""`gyre inspect`, the final report and `gyre export` on a run directory: what a user sees."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from synthetic_journal import journal
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gyre.cli.commands import inspect as inspect_module
from gyre.cli.commands.export import export
from gyre.cli.commands.inspect import inspect
from gyre.cli.commands.report import final_report
from gyre.cli.main import main
from gyre.core.errors import ConfigError
from gyre.core.events import ProcessLost
from gyre.core.records import Assessment, CallRecord, Outcome, RoleClass, Validity
from gyre.store import RunDir


def call(seq: int, parent: str | None, role: RoleClass, delta: list[int], output: list[int]) -> CallRecord:
    return CallRecord(
        execution_id="0-0",
        call_id=f"c{seq}",
        seq=seq,
        parent=parent,
        prefix_len=0 if parent is None else 4,
        delta_ids=delta,
        output_ids=output,
        output_logprobs=[-0.5] * len(output),
        output_versions=[0] * len(output),
        role=role,
        cells=[1, 0] if seq == 1 else [1],
        flags=["replayed"] if seq == 1 else [],
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run", "")
    with run.open_store() as store:
        for event in journal(4):
            store.append(event)
        store.put_record(call(0, None, RoleClass.MAIN, [0, 1], [2, 3]))
        store.put_record(call(1, "c0", RoleClass.MAIN, [1], [2]))
        store.put_record(call(2, None, RoleClass.SUB_AGENT, [0], [3]))
        assessment = Assessment(
            execution_id="0-0", artifact="w", evaluator="tests", score=0.75, valid=True, detail={"style": 0.5}
        )
        store.put_assessment(assessment)
        store.put_outcome(
            Outcome(
                execution_id="0-0",
                validity=Validity.VALID,
                reward=0.75,
                cause="harness_timeout",
                assessment=assessment,
                message="The harness ran out of time.",
            )
        )
    return run


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A wide recording console in place of the terminal."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(inspect_module, "open_console", lambda: console)
    return console


def test_inspect_prints_the_run(run: RunDir, screen: Console) -> None:
    before = sorted(path.name for path in run.root.iterdir())
    assert inspect(run.root) == 0
    text = screen.export_text()
    for shown in ("Steps", "Role transitions", "joined a batch under way", "Executions", "valid (harness_timeout)"):
        assert shown in text
    assert "1 main (3), 1 sub-agent (1)" in text
    assert "all held" in text
    assert sorted(path.name for path in run.root.iterdir()) == before


def test_what_a_run_holds_steers_no_terminal(run: RunDir, screen: Console) -> None:
    with run.open_store() as store:
        store.append(ProcessLost(t=99.0, name="[bold]x", detail="[/red] \x1b]0;title\x07 \u202e"))
    assert inspect(run.root) == 0
    text = screen.export_text()
    assert "[bold]x" in text
    assert "lost: [/red] ␛]0;title␇ �" in text


def test_inspect_writes_json(run: RunDir, tmp_path: Path, screen: Console) -> None:
    assert inspect(run.root, json_out=tmp_path / "out.json") == 0
    document = json.loads((tmp_path / "out.json").read_text())
    first = next(execution for execution in document["executions"] if execution["id"] == "0-0")
    assert first["leaves"] == [{"role": "main", "targets": 3}, {"role": "sub-agent", "targets": 1}]
    assert (first["calls"], first["nodes"], first["reward"]) == (3, 3, 0.75)
    with pytest.raises(ConfigError, match="cannot be written"):
        inspect(run.root, json_out=tmp_path / "missing" / "out.json")


def test_json_of_an_execution_has_all_that_the_text_has(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(run.root, execution="0-0", json_out=Path("-")) == 0
    document = json.loads(capsys.readouterr().out)
    assert [call["output_ids"] for call in document["calls"]] == [[2, 3], [2], [3]]
    assert document["outcome"]["message"] == "The harness ran out of time."
    assert document["assessments"][0]["score"] == 0.75


def test_inspect_shows_an_execution_as_ids(run: RunDir, screen: Console) -> None:
    assert inspect(run.root, execution="0-0") == 0
    text = screen.export_text()
    assert "call 1  main" in text
    assert "1→0" in text, "the cells of a rerouted call"
    assert "replayed" in text
    assert "out  2 3" in text
    assert "outcome: valid, reward 0.750, harness_timeout. The harness ran out of time." in text
    assert "assessment by tests: score 0.750 style 0.500" in text


def test_inspect_shows_text_when_the_tokenizer_is_there(run: RunDir, tmp_path: Path, screen: Console) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    Tokenizer(WordLevel({"alpha": 0, "beta": 1, "gamma": 2, "delta": 3}, unk_token="alpha")).save(
        str(policy / "tokenizer.json")
    )
    run.config.write_text(f'[policy]\nmodel = "{policy}"\n')
    inspect(run.root, execution="0-0")
    assert "out  gamma delta" in screen.export_text()


def test_inspect_refuses_what_is_not_there(run: RunDir, tmp_path: Path, screen: Console) -> None:
    with pytest.raises(ConfigError, match=r"no execution '7-7'; it has 1, from 0-0"):
        inspect(run.root, execution="7-7")
    with pytest.raises(ConfigError, match="does not exist"):
        inspect(tmp_path / "nothing")


def test_the_final_report_can_be_repeated(run: RunDir) -> None:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for _ in range(2):
        final_report(run.root, console)
    text = console.export_text()
    assert "reward" in text
    assert "trainer and engine differ by at most 4.0e-05" in text
    for picture in ("reward.png", "timeline.png"):
        assert (run.root / picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_ended_before_its_first_step_is_reported(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    with run.open_store() as store:
        store.append(journal(2)[0])
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    final_report(run.root, console)
    assert "not finished" in console.export_text()
    assert not list(run.root.glob("*.png"))


def checkpoint(run: RunDir, version: int) -> None:
    path = run.checkpoint_path(version)
    path.mkdir()
    (path / "trainer.json").write_text("{}")
    (path / "config.json").write_text(f'{{"version": {version}, "dtype": "bfloat16"}}')
    for name in ("model.safetensors", "optimizer.safetensors"):
        save_file({"w": np.full(4, 1.001 * version, np.float32)}, path / name)


def test_export_takes_the_newest_checkpoint(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (2, 4):
        checkpoint(run, version)
    assert export(run.root, tmp_path / "hf") == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"version": 4, "dtype": "float32"}
    assert (
        capsys.readouterr().out
        == f"Version 4 of {run.root} is in {tmp_path}/hf: 4 parameters in 1 tensors of float32.\n"
    )


def test_export_takes_any_checkpoint_that_is_kept_in_any_type(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (2, 4):
        checkpoint(run, version)
    assert main(["export", str(run.root), "--hf", str(tmp_path / "a"), "--version", "2", "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"version": 2, "dtype": "bfloat16"}
    assert "of bfloat16, 100.0% of them rounded (--dtype float32 rounds none)." in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"has no checkpoint of version 3: name one that is kept \(2, 4\)"):
        export(run.root, tmp_path / "b", 3)
    with pytest.raises(ConfigError, match=r"--dtype int8 is not known: use one of float32, bfloat16, float16"):
        export(run.root, tmp_path / "b", dtype="int8")
    (run.checkpoint_path(2) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="v000002 is damaged"):
        export(run.root, tmp_path / "b", 2)


def test_export_into_what_cannot_be_written_is_one_sentence(run: RunDir) -> None:
    checkpoint(run, 1)
    with pytest.raises(ConfigError, match=r"/proc/none cannot be written \(.*\): choose another directory for --hf"):
        export(run.root, Path("/proc/none"))


def test_export_needs_a_checkpoint_and_an_empty_directory(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        export(run.root, tmp_path / "hf")
    checkpoint(run, 2)
    with pytest.raises(ConfigError, match="is not empty"):
        export(run.root, run.root)
    with pytest.raises(ConfigError, match="is a file"):
        export(run.root, run.config)
