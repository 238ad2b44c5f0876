"""Checkpoints: a directory that is a Hugging Face model plus what training needs to go on exactly.

    config.json, tokenizer files,
    templates, licence, …          copied from the model that training started from
    model.safetensors              parameters, Hugging Face names and shapes, and what the model has besides
    optimizer.safetensors          Adam moments under "<moment>/<parameter>", and the torch RNG state
    trainer.json                   version and number of updates

The layout is that of the model, not of the ranks: a run may resume with another parallel layout. A directory appears
whole, by rename, or not at all; a writer that dies leaves the checkpoints before it as they were.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gyre.core.errors import CheckpointFailed, ConfigError, WeightsUnavailable
from gyre.store.rundir import CHECKPOINT_COUNTERS, CHECKPOINT_OPTIMIZER, CHECKPOINT_WEIGHTS
from gyre.training.storage.files import Files

_RNG = "rng/torch"
_PARTIAL = ".partial"
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot")
_FOLDERS = ("additional_chat_templates",)
"""Of a tokenizer. Other folders of a model hold its weights again, in other forms."""


class CheckpointReader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a checkpoint holds, in host memory that nothing else writes to."""

    version: int
    steps: int
    """Adam updates; equals `version` when the run began with version 0."""
    parameters: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    rng: torch.Tensor


class _Counters(msgspec.Struct):
    """trainer.json"""

    version: int
    steps: int


class Writer:
    """Writes checkpoints in a thread of its own, so that training goes on after a copy in memory. One at a time: at
    most one copy waits for the disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def settle(self) -> None:
        """Returns when the last write has ended, one way or the other."""
        wait([self._last] if self._last else [])

    def start(self, directory: str, model_dir: str, checkpoint: CheckpointReader) -> Future[None]:
        """Begins `write`; the future has its outcome."""
        self._last = self._thread.submit(write, directory, model_dir, checkpoint)
        return self._last


def write(directory: str, model_dir: str, checkpoint: CheckpointReader) -> None:
    """Writes `directory`, replacing what was there, and removes what earlier writers left unfinished beside it.
    `model_dir` gives config and tokenizer. Raises CheckpointFailed."""
    try:
        _write(Path(directory), Path(model_dir), checkpoint)
    except (OSError, SafetensorError) as error:
        raise CheckpointFailed(
            f"the checkpoint {directory} could not be written ({error}): make room or repair the disk, "
            "then continue from the one before with gyre train --resume"
        ) from error


def _write(target: Path, model_dir: Path, checkpoint: CheckpointReader) -> None:
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    for left in target.parent.glob(f".*{_PARTIAL}"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)
    for file in model_dir.iterdir():
        if file.is_file() and file.suffix not in _NOT_COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, partial / file.name)
        elif file.is_dir() and file.name in _FOLDERS:
            shutil.copytree(file, partial / file.name)
    moments = {f"{m}/{name}": t for m, tensors in checkpoint.moments.items() for name, t in tensors.items()}
    whole = {**carried(str(model_dir), checkpoint.parameters), **checkpoint.parameters}
    save_file(_plain(whole), partial / CHECKPOINT_WEIGHTS, metadata={"format": "pt"})
    save_file(_plain({**moments, _RNG: checkpoint.rng}), partial / CHECKPOINT_OPTIMIZER)
    counters = _Counters(checkpoint.version, checkpoint.steps)
    (partial / CHECKPOINT_COUNTERS).write_bytes(msgspec.json.encode(counters))
    for file in (*partial.rglob("*"), partial):
        _sync(file)
    if target.exists():
        shutil.rmtree(target)
    os.rename(partial, target)
    _sync(target.parent)


@contextmanager
def reading(weights: str) -> Iterator[None]:
    """An error about tensors that are missing or of another shape becomes one that tells where they were read."""
    try:
        yield
    except WeightsUnavailable as error:
        raise ConfigError(f"{weights} does not fit config.json beside it: {error}; get the whole directory") from error


def read(directory: str, model_dir: str) -> CheckpointReader:
    """Raises ConfigError when the directory is not a whole checkpoint, or is one of another model than `model_dir`."""
    source = Path(directory)
    try:
        theirs, ours = (json.loads((path / "config.json").read_text()) for path in (source, Path(model_dir)))
        counters = msgspec.json.decode((source / CHECKPOINT_COUNTERS).read_bytes(), type=_Counters)
        parameters = load_file(source / CHECKPOINT_WEIGHTS)
        rest = load_file(source / CHECKPOINT_OPTIMIZER)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{directory} is not a checkpoint that training can go on from: {error}") from error
    different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if different:
        raise ConfigError(
            f"{directory} is a checkpoint of another model than {model_dir}: their config.json differ in "
            f"{', '.join(different)}; go on with the model that the run began with"
        )
    if (rng := rest.pop(_RNG, None)) is None:
        raise ConfigError(f"{directory}/optimizer.safetensors has no {_RNG}: it is not what training left there")
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in rest.items():
        moment, _, name = key.partition("/")
        moments.setdefault(moment, {})[name] = tensor
    return CheckpointReader(
        version=counters.version, steps=counters.steps, parameters=parameters, moments=moments, rng=rng
    )


def carried(model_dir: str, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model's files that are not trained (vision, multi-token prediction), as they are."""
    try:
        files = Files(model_dir)
    except ConfigError:
        return {}
    tied = {"lm_head.weight"} if "lm_head.weight" not in trained else set()
    return {name: files.tensor(name) for name in files if name not in trained and name not in tied}


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
