"""The experts that a mixture-of-experts policy chose for tokens, packed: what an engine tells and a trainer replays.

One position of a token sequence has `layers` × `chosen` expert ids: in every layer that has experts, in the order of
the layers, the k experts of that token, in no particular order. An id takes one byte up to 256 experts, else two,
little-endian. A position without a record is absent as a whole: all its bytes are 0xff, which no position with a record
has, because its k experts differ.

Shapes: `_P` positions, `L` layers with experts, `k` experts per token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gyre.core.errors import InvariantViolation

Choices = npt.NDArray[Any]
"""[P, L, k], of the integer type of `id_type`."""


def id_type(experts: int, chosen: int) -> npt.DTypeLike:
    """The smallest type in which a position of its largest value alone is no choice of `chosen` experts."""
    return np.dtype("<u1") if experts <= (0x100 if chosen > 1 else 0xFF) else np.dtype("<u2")


def expert_count(config: Mapping[str, Any]) -> int:
    """From a config.json; 0 without experts. transformers 5 writes another name than the published models have."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def sparse_layers(layers: int, dense: Sequence[int], step: int) -> list[int]:
    """The layers, counted from 0, that have experts in Qwen's configs: every `step`-th, but for those named in `dense`.
    Choices name them in this order."""
    return [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]


class ExpertRouting(msgspec.Struct, frozen=True, array_like=True):
    """Choices of consecutive positions. Raises InvariantViolation when the bytes are not whole positions."""

    layers: int
    chosen: int
    experts: int
    data: bytes

    def __post_init__(self) -> None:
        if min(self.shape) < 1 or len(self.data) % self.width:
            raise InvariantViolation(
                f"{len(self.data)} bytes are no choices of {self.chosen} experts out of {self.experts} "
                f"in {self.layers} layers"
            )

    @property
    def width(self) -> int:
        """Bytes of a position."""
        return self.layers * self.chosen * np.dtype(id_type(self.experts, self.chosen)).itemsize

    @property
    def positions(self) -> int:
        return len(self.data) // self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts per token, experts."""
        return self.layers, self.chosen, self.experts

    def choices(self) -> Choices:
        """[P, L, k], read-only."""
        return np.frombuffer(self.data, id_type(self.experts, self.chosen)).reshape(-1, self.layers, self.chosen)

    def known(self) -> npt.NDArray[np.bool_]:
        """Which positions have a record, [P]. Raises InvariantViolation for an id that no expert has."""
        ids = self.choices()
        known: npt.NDArray[np.bool_] = (ids != np.iinfo(ids.dtype).max).any((1, 2))
        if bool((ids[known] >= self.experts).any()):
            raise InvariantViolation(f"choices hold ids that none of {self.experts} experts has")
        return known

    def part(self, start: int, stop: int | None = None) -> "ExpertRouting":
        """Positions [start, stop)."""
        end = len(self.data) if stop is None else stop * self.width
        return msgspec.structs.replace(self, data=self.data[start * self.width : end])

    def absent(self, positions: int) -> "ExpertRouting":
        """As many positions without a record, of the same shape."""
        return msgspec.structs.replace(self, data=b"\xff" * (positions * self.width))

    def of_length(self, positions: int) -> "ExpertRouting":
        """Cut, or filled up with absent positions."""
        missing = positions - self.positions
        return joined([self, self.absent(missing)]) if missing > 0 else self.part(0, positions)

    def replaced(self, choices: Choices) -> "ExpertRouting":
        return msgspec.structs.replace(self, data=choices.tobytes())


def joined(parts: Sequence[ExpertRouting]) -> ExpertRouting:
    """One after the other; at least one. Raises InvariantViolation for choices of different models."""
    if len({part.shape for part in parts}) != 1:
        raise InvariantViolation(
            f"choices of different models, {sorted({part.shape for part in parts})}, in one sequence"
        )
    return msgspec.structs.replace(parts[0], data=b"".join(part.data for part in parts))
