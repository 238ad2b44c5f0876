"""A call that moves between two local engine processes: with its KV, and with its context computed anew.

    python benchmarks/kv_handoff.py [--contexts 256 1024 1536] [--hidden 128] [--calls 1] [--repeats 15] [--json OUT]

The source has computed each call's context and 32 tokens of its answer when it is asked to let go of it. Measured is
the time from there to the first new token at the destination, through the proxy's router over RPC: the drain, the
hand-off if any, and the next leg, whose first token needs the rest of the prompt. `--calls` move at once, and the last
one counts. Every repeat takes both ways, in alternating order, with prompts of its own; ratios are medians of the
ratios of one repeat. The default shape is that of examples/policy.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gyre.core.tokens import TokenIds
from gyre.engines.base import Engine, KvRef, Sampling
from gyre.engines.local.config import LocalEngineConfig, LocalSection
from gyre.launch.base import ProcessSpec, encode_config
from gyre.launch.local import LocalLauncher
from gyre.proxy.base import EngineRoute
from gyre.proxy.router.router import Router, RouterLimits
from gyre.rpc import Connection, connect
from gyre.transport.shm import ShmTransport
from gyre.transport.state import published_state

VOCABULARY = 1580
DONE = 32
"""Tokens that the source has produced of each answer."""
LIMITS = RouterLimits(hold_s=60.0, stall_s=60.0, drain_s=30.0, handoff_s=30.0)


class WithoutKv:
    """An engine that offers no KV, as SGLang's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def export_kv(self, input_ids: TokenIds) -> KvRef | None: ...


class Link:
    def __init__(self, stub: Any) -> None:
        self.stub = stub

    async def close(self) -> None: ...


def make_policy_model(directory: Path, hidden: int, layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    config.save_pretrained(directory)
    return Qwen3ForCausalLM(config).eval()


async def move(engines: list[Engine], prompts: list[list[int]], with_kv: bool) -> tuple[float, int]:
    """Seconds from the start of the drain until every call has a new token, and prompt tokens that were cached then."""
    source: Any = engines[0] if with_kv else WithoutKv(engines[0])
    links = {"source": Link(source), "destination": Link(engines[1])}
    router = Router(lambda address: links[address], LIMITS)
    router.set_routes([EngineRoute(cell=0, address="source", capacity=64)])
    started = [asyncio.Event() for _ in prompts]
    arrived: dict[int, tuple[float, int]] = {}

    async def call(number: int) -> None:
        produced = 0
        pieces = router.generate(f"e{number}", TokenIds(prompts[number]), 1024, Sampling())
        async for piece in pieces:
            produced += len(piece.output_ids)
            if produced >= DONE:
                started[number].set()
            if piece.cell == 1 and piece.output_ids:
                arrived[number] = time.perf_counter(), piece.cached_tokens
                await pieces.aclose()
                return
        raise SystemExit("a call ended before it was moved")

    calls = [asyncio.create_task(call(number)) for number in range(len(prompts))]
    await asyncio.gather(*(event.wait() for event in started))
    router.set_routes([EngineRoute(cell=1, address="destination", capacity=64)])
    begin = time.perf_counter()
    report = await router.drain(0)
    await asyncio.gather(*calls)
    if report.with_kv != (len(prompts) if with_kv else 0):
        raise SystemExit(f"{report.with_kv} of {len(prompts)} calls moved with KV")
    return max(at for at, _ in arrived.values()) - begin, sum(cached for _, cached in arrived.values())


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        root = Path(scratch)
        model = make_policy_model(root / "model", options.hidden, options.layers)
        weights = ShmTransport(str(root / "weights")).publish(1, published_state(model))
        config = LocalEngineConfig(
            model_dir=str(root / "model"),
            transport_root=str(root / "weights"),
            weights=weights,
            max_context=8192,
            seed=0,
            section=LocalSection(kv_blocks=4096),
        )
        (root / "logs").mkdir()
        async with LocalLauncher(root / "logs") as launcher:
            connections: list[Connection[Engine]] = []
            for i in range(2):
                spec = ProcessSpec(
                    name=f"engine-{i}",
                    entry="gyre.engines.local.worker:main",
                    config=encode_config(msgspec.structs.replace(config, seed=i)),
                    env={"OMP_NUM_THREADS": "1"},
                )
                connections.append(connect(Engine, (await launcher.start(spec)).address, launcher.secret))
            engines = [connection.stub for connection in connections]
            draw = torch.Generator().manual_seed(0)
            for context in options.contexts:
                rows.append(await compare(engines, context, options, draw))
                print(json.dumps(rows[-1]), flush=True)
            for connection in connections:
                await connection.close()
    return rows


async def compare(
    engines: list[Engine], context: int, options: argparse.Namespace, draw: torch.Generator
) -> dict[str, Any]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cached = 0
    # The first repeat warms up.
    for repeat in range(options.repeats + 1):
        for with_kv in (True, False) if repeat % 2 else (False, True):
            prompts = torch.randint(0, VOCABULARY, (options.calls, context), generator=draw).tolist()
            spent, found = await move(engines, prompts, with_kv)
            if with_kv:
                cached = found // options.calls
            if repeat:
                seconds[with_kv].append(spent)
    return {
        "context": context,
        "calls": options.calls,
        "with_kv_ms": 1000 * statistics.median(seconds[True]),
        "anew_ms": 1000 * statistics.median(seconds[False]),
        "ratio": statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True)),
        "cached_tokens": cached,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 1536])
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    if options.json:
        settings = {"hidden": options.hidden, "layers": options.layers, "repeats": options.repeats}
        options.json.write_text(json.dumps({**settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
