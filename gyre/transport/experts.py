"""Experts in safetensors files and in memory.

A Hugging Face file, and with it everything that Gyre publishes or saves, has three tensors per expert; the model in
memory has two per layer:

    …mlp.experts.3.{gate,up}_proj.weight   [I, H] each   ↔   …mlp.experts.gate_up_proj   [experts, 2·I, H]
    …mlp.experts.3.down_proj.weight        [H, I]        ↔   …mlp.experts.down_proj      [experts, H, I]

Names without experts pass unchanged, in both directions.
"""

import re
from collections.abc import Mapping, Sequence

import torch

from gyre.core.errors import WeightsUnavailable

NAMED = 3
"""Missing tensors that an error names."""

_IN_FILE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_IN_MEMORY = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def fuse(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """File → memory. Raises WeightsUnavailable when a layer has only some parts of its experts."""
    fused: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _IN_FILE.fullmatch(name)
        if match is None:
            fused[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    lost = [
        f"{name}.{i}.{part}_proj.weight"
        for name, of_layer in experts.items()
        for i in range(max(of_layer) + 1)
        for part in ("gate", "up", "down")
        if part not in of_layer.get(i, {})
    ]
    if lost:
        raise lacking(lost)
    for name, of_layer in experts.items():
        parts = [of_layer[i] for i in sorted(of_layer)]
        fused[f"{name}.gate_up_proj"] = torch.stack([torch.cat([part["gate"], part["up"]]) for part in parts])
        fused[f"{name}.down_proj"] = torch.stack([part["down"] for part in parts])
    return fused


def lacking(names: Sequence[str]) -> WeightsUnavailable:
    """The error that tells a few of the tensors that are not there."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return WeightsUnavailable(f"tensors are missing: {', '.join(names[:NAMED])}{more}")


def split(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Memory → file. The result shares memory with `tensors`."""
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _IN_MEMORY.fullmatch(name)
        if match is None:
            apart[name] = tensor
        elif match[2] == "down":
            apart |= {f"{match[1]}.{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
        else:
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                apart |= {f"{match[1]}.{i}.gate_proj.weight": gate, f"{match[1]}.{i}.up_proj.weight": up}
    return apart
