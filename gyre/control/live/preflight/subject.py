"""What the checks look at, and what the checks of several rooms need of it."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gyre.control.live.config import RunConfig
from gyre.core.errors import ConfigError
from gyre.launch.section import HereSection
from gyre.store import RunDir
from gyre.training.models.architecture import Architecture
from gyre.training.models.families import read_architecture


class Subject(NamedTuple):
    config: RunConfig
    run_dir: Path | None = None
    """Where a new run will lie; None where nobody has said."""
    resume: RunDir | None = None
    """The run that goes on."""

    @property
    def here(self) -> bool:
        """Whether all processes run on this machine."""
        return isinstance(self.config.launch, HereSection)

    @property
    def engines(self) -> int:
        """Processes that serve the policy."""
        scheduler = self.config.scheduler
        return len(scheduler.pool) + (0 if scheduler.mode == "async" else scheduler.cells)

    @property
    def trainers(self) -> int:
        return self.config.scheduler.cells * self.config.trainer.parallel.ranks


def read_model(model: Path) -> tuple[dict[str, Any], Architecture]:
    """config.json of a model directory, as it is and as an architecture. Raises ConfigError."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
        return config, read_architecture(config, f"policy.model = {model}")
    except OSError as error:
        raise ConfigError(
            f"policy.model = {model}: config.json cannot be read ({error.strerror}); "
            "give a Hugging Face model directory with safetensors weights and a tokenizer"
        ) from None
    except (msgspec.DecodeError, TypeError, AttributeError) as error:
        raise ConfigError(f"config.json of policy.model = {model} is not that of a language model ({error})") from None
