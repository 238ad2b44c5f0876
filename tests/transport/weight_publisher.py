"""A process that publishes weights, driven line by line: `python weight_publisher.py KIND`.

Every command is a JSON list on standard input; the answer is one line of JSON.
"""

import json
import sys

import msgspec
import torch

from gyre.transport.base import WeightTransport
from gyre.transport.section import MooncakeSection, ShmSection, open_transport

SECTIONS = {"shm": ShmSection(), "mooncake": MooncakeSection()}


def weights(version: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """Every element of every tensor tells the version, so that a mix shows."""
    return {
        "b.weight": torch.full((size, 3), float(version)),
        "a.weight": torch.full((size,), version, dtype=torch.bfloat16),
        "scalar": torch.tensor(version),
    }


def main(kind: str) -> None:
    transport: WeightTransport
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: object = None
        if command == "open":
            transport = open_transport(SECTIONS[kind], *arguments, "127.0.0.1")
        elif command == "publish":
            version, seed, size = arguments
            source = weights(seed, size)
            answer = msgspec.to_builtins(transport.publish(version, source))
            # What is published must not follow.
            source["b.weight"].add_(1.0)
        elif command == "retire":
            transport.retire(set(arguments[0]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
