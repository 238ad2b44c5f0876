"""One execution call by call: where each call attaches to the tree, its tokens, their text where it can be decoded."""

import tomllib
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from gyre.core.errors import ConfigError
from gyre.core.records import CallRecord
from gyre.store import RunDir, RunStore

Decode = Callable[[list[int]], str]
MAX_CHARACTERS = 600


def print_execution(console: Console, run: RunDir, store: RunStore, execution_id: str) -> None:
    """Raises ConfigError when the run has no such execution."""
    records, outcome = store.records(execution_id), store.outcome(execution_id)
    if not records and outcome is None:
        known = store.execution_ids()
        raise ConfigError(
            f"{run.root} has no execution {execution_id!r}"
            + (f"; it has {len(known)}, from {known[0]} to {known[-1]}." if known else ": none has made a call yet.")
        )
    decode = decoder(run)
    console.print(_calls(records), "")
    for record in records:
        console.rule(f"call {record.seq}  {record.role.value}", align="left", style="dim")
        console.print(Text("in   ", style="dim"), _tokens(record.delta_ids, decode, "blue"), sep="")
        console.print(Text("out  ", style="dim"), _tokens(record.output_ids, decode, "green"), sep="")
    if outcome is not None:
        console.rule(style="dim")
        console.print(
            f"outcome: {outcome.validity.value}, reward {outcome.reward:.3f}, {outcome.cause}. {outcome.message}"
        )
    for assessment in store.assessments(execution_id):
        score = "no score" if assessment.score is None else f"score {assessment.score:.3f}"
        parts = ", ".join(f"{name} {value:.3f}" for name, value in assessment.detail.items())
        console.print(f"assessment by {assessment.evaluator}: {score} {parts} {assessment.error}".rstrip())


def decoder(run: RunDir) -> Decode | None:
    """Token ids → text with the tokenizer of the policy that the run's config names; None when it is not there."""
    config = tomllib.loads(run.config.read_text())
    model = config.get("policy", {}).get("model")
    if model is None or not (run.root / model / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_file(str(run.root / model / "tokenizer.json"))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return decode


def _calls(records: list[CallRecord]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in (
        "call",
        "extends",
        "role",
        "agent",
        "shared",
        "new in",
        "out",
        "finish",
        "cells",
        "versions",
        "notes",
    ):
        table.add_column(column, justify="right" if column in ("call", "shared", "new in", "out") else "left")
    seq_of = {record.call_id: record.seq for record in records}
    for record in records:
        versions = sorted(set(record.output_versions))
        notes = [*record.flags, *(f"{kind}×{count}" for kind, count in record.drift.items())]
        table.add_row(
            str(record.seq),
            "root" if record.parent is None else f"call {seq_of.get(record.parent, '?')}",
            record.role.value,
            record.agent_id,
            str(record.prefix_len),
            str(len(record.delta_ids)),
            str(len(record.output_ids)),
            record.finish,
            "→".join(map(str, record.cells)),
            " ".join(map(str, versions)),
            ", ".join(notes if record.trainable else ["never a target", *notes]),
        )
    return table


def _tokens(ids: list[int], decode: Decode | None, style: str) -> Text:
    if decode is None:
        shown = " ".join(map(str, ids[:40]))
        return Text(shown + (f" … ({len(ids)} tokens)" if len(ids) > 40 else ""), style=style)
    text = decode(ids)
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]} … ({len(text) - 2 * half} characters) … {text[-half:]}"
    return Text(text, style=style)
