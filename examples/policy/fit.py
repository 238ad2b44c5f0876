"""Fits the tiny policy to demonstrations and writes it to examples/policy/tiny.

    python examples/policy/capture.py                      # once: how the harnesses present a job
    python examples/policy/fit.py [--steps N] [--out DIR]

Cross-entropy on the tokens that the agent samples, in demonstrations of the example tasks. First with prompts of a few
words, where a step is cheap; then in the harnesses' own prompts. All demonstrations of a step share their first tokens,
which are computed once and broadcast. One seed, one thread: equal inputs give equal weights on one machine.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from capture import CAPTURED, PROBES, Captured
from demonstrations import (
    TASKS,
    Frame,
    Habits,
    captured_frame,
    demonstration,
    example_job,
    job,
    prompted,
    short_frame,
)
from tokens import tokens, trained_tokenizer
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gyre.chat.conversation import Conversation
from gyre.chat.render import ChatRenderer

SEED = 0
STEPS = 500
BATCH = 8
LEARNING_RATE = 3e-3
VOCABULARY = 4096
SHARPNESS = 1.6
"""Initial query and key norms."""
EAGER = Habits(go_on=0.9)
"""Habits in the first part: longer conversations, so more to learn from each."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Shared first ids [1, P]; the remaining ids [N, T]; their next-token targets [N, T], −100 for context."""


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    for layer in model.model.layers:
        # With unit query and key norms no attention weight could stand out of a thousand tokens.
        layer.self_attn.q_norm.weight.data.fill_(SHARPNESS)
        layer.self_attn.k_norm.weight.data.fill_(SHARPNESS)
    return model


class Fit:
    """The policy being fitted, with what makes its batches."""

    def __init__(self, frames: list[Frame]) -> None:
        self.rng = random.Random(SEED)
        self.frames = frames
        self.examples = [example_job(path.parent) for path in sorted(TASKS.glob("*/task.toml"))]
        self.tokenizer = trained_tokenizer(self._vocabulary_sample(3000), VOCABULARY)
        self.renderer = ChatRenderer(self.tokenizer, "qwen3", thinking=False)
        torch.manual_seed(SEED)
        self.model = new_model(self.tokenizer)

    def _vocabulary_sample(self, count: int) -> Iterator[Conversation]:
        for index in range(count):
            frame = short_frame(self.rng) if index % 20 else prompted(self.rng.choice(self.frames), self.rng)
            yield demonstration(job(self.rng), EAGER, frame, self.rng)

    def batch(self, frame: Frame, habits: Habits) -> Batch:
        """Demonstrations that all have one frame."""
        rows = []
        for _ in range(BATCH):
            told = demonstration(self.rng.choice(self.examples), habits, frame, self.rng)
            rows.append(tokens(told, self.renderer, self.tokenizer))
        return self._padded(rows, _shared([ids for ids, _ in rows]))

    def _padded(self, rows: list[tuple[list[int], list[bool]]], shared: int) -> Batch:
        width = max(len(ids) for ids, _ in rows) - shared
        rest = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        targets = torch.full((len(rows), width), -100)
        for row, (ids, sampled) in enumerate(rows):
            rest[row, : len(ids) - shared] = torch.tensor(ids[shared:])
            following = [ids[at] if sampled[at] else -100 for at in range(shared + 1, len(ids))]
            targets[row, : len(following)] = torch.tensor(following)
        return torch.tensor([rows[0][0][:shared]], dtype=torch.long), rest, targets

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy of the sampled tokens."""
        first, rest, targets = batch
        cache = DynamicCache()
        self.model.model(first, past_key_values=cache)
        for layer in cache.layers:
            layer.keys = layer.keys.expand(len(rest), -1, -1, -1)
            layer.values = layer.values.expand(len(rest), -1, -1, -1)
        positions = torch.arange(first.shape[1], first.shape[1] + rest.shape[1])[None]
        hidden = self.model.model(rest, past_key_values=cache, position_ids=positions).last_hidden_state
        own = targets != -100
        return torch.nn.functional.cross_entropy(self.model.lm_head(hidden[own]), targets[own])

    def run(self, steps: int) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        started, average = time.monotonic(), None
        for step in range(steps):
            part = step / steps
            pace = min(1.0, (step + 1) / 30, 0.02 + 0.98 * math.cos(math.pi / 2 * part) ** 2)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * pace
            loss = self.loss(self._batch(part))
            self.model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
            if step % 50 == 49 or step == steps - 1:
                print(f"step {step + 1}/{steps}  loss {average:.4f}  {time.monotonic() - started:.0f} s", flush=True)

    def _batch(self, part: float) -> Batch:
        """What is learnt when `part` of all steps is done."""
        if part < 0.35:
            return self.batch(short_frame(self.rng), EAGER if part < 0.2 else Habits())
        return self.batch(
            prompted(self.rng.choice(self.frames), self.rng), Habits(go_on=0.7) if part < 0.6 else Habits()
        )


def _shared(rows: list[list[int]]) -> int:
    """Length of the common start, short of any row's end."""
    low, high = min(rows), max(rows)
    return next(at for at in range(min(len(low), len(high))) if low[at] != high[at])


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the tiny policy.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not CAPTURED.exists():
        parser.error(f"{CAPTURED} is missing: run examples/policy/capture.py first.")
    runs = msgspec.json.decode(CAPTURED.read_bytes(), type=list[Captured])
    frames = [captured_frame(run.requests, [output for _, output in PROBES]) for run in runs]
    fit = Fit(frames)
    fit.run(options.steps)
    fit.model.to(torch.bfloat16).save_pretrained(options.out)
    fit.tokenizer.save_pretrained(options.out)
    parameters = sum(parameter.numel() for parameter in fit.model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {len(fit.tokenizer)} tokens, written to {options.out}.")


if __name__ == "__main__":
    main()
