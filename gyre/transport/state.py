"""The one layout of published weights and its digest, shared by trainers, engines, checkpoints and export.

Names are those of the Hugging Face `state_dict()`, shapes are whole (unsharded); experts are apart, as in
Hugging Face files (`gyre.transport.experts`). A tensor that is tied to another one is published once, under the name
that comes first in the state dict: with `tie_word_embeddings` that is `model.embed_tokens.weight`, and `lm_head.weight`
is absent. So both sides of a transport compute the same digest.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from gyre.transport import experts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

_BLOCK = 1 << 14
"""Words of a block: it and its factors stay in a core's cache."""
_THREADS = min(4, os.cpu_count() or 1)
_FACTORS = np.frombuffer(hashlib.shake_128(b"gyre").digest(8 * _BLOCK), np.int64) | 1


def published_state(model: "nn.Module") -> "dict[str, Tensor]":
    """The tensors of a Hugging Face model that are published: its state dict without tied duplicates, not copied."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        # Empty and meta tensors have no address that could tell them apart.
        if tensor.data_ptr() != 0 and place in seen:
            continue
        seen.add(place)
        state[name] = tensor.detach()
    return experts.split(state)


def checksum(tensors: "Mapping[str, Tensor]") -> str:
    """Digest over names, dtypes, shapes and bytes in name order; any change of one bit changes it.

    Bytes are hashed block by block with a multilinear function over 64-bit words (odd random factors, so a changed word
    always shows) and the blocks' values with BLAKE2b. It finds damage and mix-ups at the speed of a memory copy; it is
    no defence against an author of weights who wants two of them to collide."""
    digest = hashlib.blake2b(digest_size=16)
    names = sorted(tensors)
    with ThreadPoolExecutor(min(_THREADS, len(names) or 1)) as pool:
        values = pool.map(lambda name: _block_values(_bytes(tensors[name])).tobytes(), names)
        for name, value in zip(names, values, strict=True):
            tensor = tensors[name]
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
            digest.update(value)
    return digest.hexdigest()


def _bytes(tensor: "Tensor") -> "NDArray[np.uint8]":
    data: NDArray[np.uint8] = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return data


def _block_values(data: "NDArray[np.uint8]") -> "NDArray[np.int64]":
    """One value per block of `_FACTORS`; what is no multiple of a word is filled up with zeros."""
    whole = data.size // 8
    words = data[: whole * 8].view(np.int64)
    rest = np.zeros(8, np.uint8)
    rest[: data.size - whole * 8] = data[whole * 8 :]
    values = [np.dot(words[i : i + _BLOCK], _FACTORS[: min(_BLOCK, whole - i)]) for i in range(0, whole, _BLOCK)]
    return np.array([*values, rest.view(np.int64)[0]], np.int64)
