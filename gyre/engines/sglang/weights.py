"""The model of an SGLang engine as directories: the one its server starts with, and one for each published version
that it loads from disk.

The server reads a snapshot where the transport put it, in shared memory of its own machine. What cannot fit is refused
here: SGLang 0.5.23 does not survive a load that fails half-way (its rollback reads the same directory), and tensors of
a broadcast that do not fit leave it with half of each version.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open

from gyre.core.errors import ConfigError, WeightsUnavailable
from gyre.core.expert_routing import ExpertRouting, expert_count, sparse_layers
from gyre.transport.base import WeightRef, WeightTransport

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")
# Published once, under the other name, when the embeddings are tied.
_TIED = {"lm_head.weight"}

Shapes = dict[str, list[int]]


class ModelDirs:
    """Makes one directory per version under `root`, best in shared memory. Raises ConfigError when `model_dir` is not a
    model with weights."""

    def __init__(self, model_dir: str, root: Path) -> None:
        self._source = Path(model_dir).resolve()
        self._root = root
        files = sorted(self._source.glob("*.safetensors"))
        if not files or not (self._source / "config.json").is_file():
            raise ConfigError(f"sglang engine: model_dir = {model_dir} has no config.json and *.safetensors")
        self._shapes: Shapes = {name: shape for file in files for name, shape in shapes(file).items()}
        self._config: dict[str, Any] = msgspec.json.decode((self._source / "config.json").read_bytes())
        if expert_count(self._config):
            self._require_experts_everywhere(model_dir)

    @property
    def vocabulary(self) -> int:
        return int(self._config["vocab_size"])

    @property
    def positions(self) -> int:
        """Longest context of the model; very large when it does not say."""
        return int(self._config.get("max_position_embeddings") or 1 << 30)

    def experts(self) -> ExpertRouting:
        """The shape of a token's experts, without positions. Raises ConfigError when the model is not Qwen3-MoE."""
        config = self._config
        if config.get("model_type") != "qwen3_moe":
            raise ConfigError(
                f"sglang engine: the experts of a {config.get('model_type')} model cannot be told; "
                "set trainer.replay_routing = false"
            )
        return ExpertRouting(config["num_hidden_layers"], config["num_experts_per_tok"], expert_count(config), b"")

    def serving(self) -> Path:
        """The directory that the server starts with: no end-of-sequence ids, so that only a request's own stop it."""
        target = self._empty("serving")
        self._link_into(target, skip=("config.json", "generation_config.json"))
        config = self._config | {"eos_token_id": None}
        (target / "config.json").write_bytes(msgspec.json.encode(config))
        return target

    def view(self, ref: WeightRef, transport: WeightTransport) -> Path:
        """The directory of a published version, after its content was verified. Raises WeightsUnavailable when the
        snapshot is gone, damaged, or of another model."""
        target = self._empty(f"v{ref.version:08d}-{ref.checksum}")
        file = target / "model.safetensors"
        try:
            transport.fetch(ref, file)
            self.require_fit(ref.version, shapes(file))
        except BaseException:
            shutil.rmtree(target)
            raise
        self._link_into(target)
        return target

    def _require_experts_everywhere(self, model_dir: str) -> None:
        config, layers = self._config, self._config["num_hidden_layers"]
        sparse = sparse_layers(layers, config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1)
        if len(sparse) < layers:
            # It would answer with other weights than the trainer's, and tell nobody.
            raise ConfigError(
                f"sglang engine: {model_dir} has layers without experts; SGLang 0.5.23 gives every layer some. "
                "Use the local engine"
            )

    def require_fit(self, version: int, found: Shapes) -> None:
        """Raises WeightsUnavailable when tensors of these names and shapes are not those of the model."""
        wrong = [name for name, shape in found.items() if self._shapes.get(name) != shape]
        missing = self._shapes.keys() - found.keys() - _TIED
        if wrong or missing:
            name = min(wrong or missing)
            shape, expected = found.get(name), self._shapes.get(name)
            raise WeightsUnavailable(f"version {version} does not fit the model: {name} is {shape}, not {expected}")

    def _empty(self, name: str) -> Path:
        target = self._root / name
        if target.exists():
            shutil.rmtree(target)
        target.mkdir(parents=True)
        return target

    def _link_into(self, target: Path, skip: tuple[str, ...] = ()) -> None:
        for file in self._source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in skip:
                (target / file.name).symlink_to(file)


def shapes(file: Path) -> Shapes:
    """Names and shapes of a safetensors file; reads its header only."""
    with safe_open(str(file), framework="numpy") as opened:
        return {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
