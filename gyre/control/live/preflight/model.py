"""The files of `policy.model`: whether they are whole, agree, and can be trained, served and rendered."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gyre.chat.render import ChatRenderer, RenderError
from gyre.control.live.fit import require_layout, require_servable
from gyre.control.live.preflight.subject import Subject, read_model
from gyre.control.live.preflight.tensors import require_tensors
from gyre.core.errors import ConfigError
from gyre.core.system.tensor_files import DamagedFile, non_finite, read_headers
from gyre.proxy.session.tokenizer import load_tokenizer
from gyre.training.models.architecture import Architecture

READ_BYTES = 256 * 2**20
"""Of weights, when looking for numbers that are not finite: all of a small model, slices of every tensor of a large one
(about a second)."""
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check(subject: Subject) -> None:
    """config.json against the run's configuration. Raises ConfigError naming the file, or the key that does not go
    with it."""
    config = subject.config
    model = config.policy.model
    for name in ("config.json", "model*.safetensors", "tokenizer.json"):
        if not any(model.glob(name)):
            raise ConfigError(
                f"policy.model = {model} has no {name}; "
                "give a Hugging Face model directory with safetensors weights and a tokenizer"
            )
    described, architecture = read_model(model)
    _require_ids(model, described, architecture)
    _require_context(config.rollout.max_context, model, described, architecture)
    if config.trainer.replay_routing and architecture.experts is None:
        raise ConfigError(
            f"trainer.replay_routing = true, but policy.model = {model} has no experts "
            "whose choice could be replayed; set it to false"
        )
    require_layout(config.trainer.parallel, architecture, str(model))
    require_servable(config.engine, architecture, str(model))


def check_weights(subject: Subject) -> None:
    """The safetensors files: whole, with the tensors of config.json, without infinities. Raises ConfigError."""
    model = subject.config.policy.model
    _, architecture = read_model(model)
    require_weights(model, architecture)


def require_weights(model: Path, architecture: Architecture) -> None:
    """`check_weights` for any directory, such as a checkpoint."""
    files = sorted(model.glob("model*.safetensors"))
    try:
        tensors = read_headers(files)
    except DamagedFile as error:
        raise ConfigError(f"{error}; get the file again") from None
    _require_index(model, {name: tensor.file.name for name, tensor in tensors.items()})
    require_tensors(tensors, architecture, str(model))
    if (name := non_finite(tensors, READ_BYTES)) is not None:
        raise ConfigError(
            f"{tensors[name].file}: {name} has numbers that are infinite or not a number; nothing can be sampled or "
            "trained from them: get the file again"
        )


def check_tokenizer(subject: Subject) -> None:
    """Whether a proxy worker could render with the policy's tokenizer, in ids that the policy has."""
    policy = subject.config.policy
    try:
        tokenizer = load_tokenizer(str(policy.model))
        vocabulary = tokenizer.get_vocab()
        ChatRenderer(tokenizer, policy.family, thinking=policy.thinking)
    except RenderError as error:
        raise ConfigError(
            f'policy.family = "{policy.family}" is not the family of policy.model = {policy.model}; '
            f"name the one that it is of ({error})"
        ) from error
    except Exception as error:  # of any type, for a file that is no tokenizer
        raise ConfigError(
            f"the tokenizer of policy.model = {policy.model} cannot be read ({type(error).__name__}: {error})"
        ) from error
    _, architecture = read_model(policy.model)
    highest = max(vocabulary, key=lambda text: vocabulary[text], default=None)
    if highest is not None and vocabulary[highest] >= architecture.vocabulary:
        raise ConfigError(
            f"the tokenizer of policy.model = {policy.model} has the id {vocabulary[highest]} ({highest!r}), and by "
            f"config.json the policy has vocab_size = {architecture.vocabulary}; get both files of the same model"
        )


def _require_ids(model: Path, described: Mapping[str, Any], architecture: Architecture) -> None:
    for file, content in (("config.json", described), ("generation_config.json", _optional(model))):
        for key in TOKEN_KEYS:
            value = content.get(key)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not (isinstance(token, int) and 0 <= token < architecture.vocabulary):
                    raise ConfigError(
                        f"{file} of policy.model = {model} says {key} = {token!r}, which is no id below vocab_size = "
                        f"{architecture.vocabulary}; get all files of the same model"
                    )


def _optional(model: Path) -> dict[str, Any]:
    file = model / "generation_config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.is_file() else {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); get the file again") from None


def _require_context(max_context: int, model: Path, described: Mapping[str, Any], architecture: Architecture) -> None:
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    factor = rope.get("factor") or 1.0 if isinstance(rope, dict) else 1.0
    most = architecture.positions * max(1.0, float(factor))
    if max_context > most:
        raise ConfigError(
            f"rollout.max_context = {max_context} is more than the {most:.0f} positions that policy.model = {model} "
            "was made for (max_position_embeddings); choose a smaller one"
        )


def _require_index(model: Path, places: Mapping[str, str]) -> None:
    file = model / "model.safetensors.index.json"
    if not file.is_file():
        return
    try:
        index = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])["weight_map"]
        wrong = [name for name, place in index.items() if places.get(name) != place]
    except (OSError, msgspec.DecodeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} is no index of weights ({type(error).__name__}: {error}); get it again") from None
    if wrong:
        raise ConfigError(
            f"{file} says that {wrong[0]} is in {index[wrong[0]]}, where it is not ({len(wrong)} of {len(index)} "
            "tensors); get the whole directory again"
        )
