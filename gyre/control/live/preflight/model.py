"""The files of `policy.model`: what is there, and whether trainers, engines and proxies can take it."""

from typing import Any

import msgspec

from gyre.control.live.config import RunConfig
from gyre.control.live.fit import Sizes, require_layout, require_servable
from gyre.core.errors import ConfigError
from gyre.core.routing import expert_count
from gyre.proxy.tokenizer import load_tokenizer
from gyre.training.config import require_trainable
from gyre.trajectory.render import ChatRenderer, RenderError


def check(config: RunConfig) -> None:
    """Raises ConfigError naming the file, or the key that does not go with it."""
    for name in ("config.json", "model*.safetensors", "tokenizer.json"):
        if not any(config.policy.model.glob(name)):
            raise ConfigError(
                f"policy.model = {config.policy.model} has no {name}; "
                "give a Hugging Face model directory with safetensors weights and a tokenizer"
            )
    try:
        model = msgspec.json.decode((config.policy.model / "config.json").read_bytes(), type=dict[str, Any])
        require_trainable(model, f"policy.model = {config.policy.model}")
        sizes = msgspec.convert(model, Sizes)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"config.json of policy.model = {config.policy.model} is not that of a language model ({error})"
        ) from None
    if config.trainer.replay_routing and not expert_count(model):
        raise ConfigError(
            f"trainer.replay_routing = true, but policy.model = {config.policy.model} has no experts "
            "whose choice could be replayed; set it to false"
        )
    require_layout(config.trainer.parallel, sizes, str(config.policy.model))
    require_servable(config.engine, sizes, str(config.policy.model))


def check_renderer(config: RunConfig) -> None:
    """Whether a proxy worker could render with the policy's tokenizer."""
    policy = config.policy
    try:
        ChatRenderer(load_tokenizer(str(policy.model)), policy.renderer, thinking=policy.thinking)
    except RenderError as error:
        raise ConfigError(
            f'policy.renderer = "{policy.renderer}" is not the family of policy.model = {policy.model}; '
            f"name the one that it is of ({error})"
        ) from error
    except Exception as error:  # of any type, for a file that is no tokenizer
        raise ConfigError(
            f"the tokenizer of policy.model = {policy.model} cannot be read ({type(error).__name__}: {error})"
        ) from error
