"""What does the session code make of recorded traffic of every harness? One row per group of traces.

    python benchmarks/replay_traces.py [--traces DIR] [--tokenizer DIR] [--json OUT]

Without --tokenizer a byte-level one is used, so the token counts are those of bytes. Exit code 1 when a call lost the
tokens of the turn that it continues.
"""

import argparse
import asyncio
import sys
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
from word_tokenizer import make_tokenizer

from gyre.harnesses import load_profile
from gyre.proxy.session.tokenizer import load_tokenizer
from gyre.replay.replay import ReplayReport, replay
from gyre.replay.traces import read_trace

PROFILES = {
    "claude220": "claude_code",
    "claude328": "claude_code_328",
    "codex": "codex",
    "qwen": "qwen_code",
    "opencode_anthropic": "opencode_messages",
    "opencode": "opencode",
    "oca": "opencode_messages",
    "ocr": "opencode_responses",
    "pir": "pi_responses",
    "pi": "pi",
    "mini": "mini_swe_agent",
}
"""How the name of a trace begins (after "probe_") → harness profile; the first that fits counts."""

COLUMNS = (
    "profile", "traces", "requests", "errors", "calls", "replayed", "orphans", "leaves", "targets", "row tokens",
    "unique tokens", "drift", "prefix breaks",
)  # fmt: skip


def profile_of(trace: str) -> str:
    name = trace.removeprefix("probe_")
    return next(profile for start, profile in PROFILES.items() if name.startswith(start))


def row(profile: str, reports: list[ReplayReport], errors: int) -> dict[str, str | int]:
    """`errors` is how many exchanges were answered with an error status: nothing was sampled."""
    leaves = Counter(str(leaf.role) for report in reports for leaf in report.leaves)
    drift: Counter[str] = Counter()
    for report in reports:
        drift.update(report.drift)
    replayed = sum(report.retries_replayed + report.retries_attached for report in reports)
    calls, orphans = sum(report.calls for report in reports), sum(report.orphans for report in reports)
    return {
        "profile": profile,
        "traces": len(reports),
        "requests": calls + orphans + replayed + errors,
        "errors": errors,
        "calls": calls,
        "replayed": replayed,
        "orphans": orphans,
        "leaves": ", ".join(f"{count} {role}" for role, count in sorted(leaves.items())),
        "targets": sum(report.targets for report in reports),
        "row tokens": sum(report.row_tokens_all_leaves for report in reports),
        "unique tokens": sum(report.unique_tokens for report in reports),
        "drift": ", ".join(f"{kind} {count}" for kind, count in sorted(drift.items())) or "none",
        "prefix breaks": sum(len(report.prefix_breaks) for report in reports),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[2] / "shared" / "traces")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    paths = sorted(arguments.traces.glob("*.jsonl"))
    if not paths:
        parser.error(f"{arguments.traces} holds no traces")
    tokenizer = load_tokenizer(str(arguments.tokenizer)) if arguments.tokenizer else make_tokenizer()
    found = defaultdict[str, dict[str, ReplayReport]](dict)
    errors = Counter[str]()
    for path in paths:
        name = profile_of(path.stem)
        profile = load_profile(name)
        exchanges = list(read_trace(path))
        errors[name] += sum(exchange.answer is None for exchange in exchanges)
        report = asyncio.run(replay(exchanges, tokenizer, profile.markers, profile.canned_answers))
        found[name][path.stem] = report
    rows = [row(name, list(reports.values()), errors[name]) for name, reports in found.items()]
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for cells in rows:
        print("| " + " | ".join(str(cells[column]) for column in COLUMNS) + " |")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode({"rows": rows, "traces": dict(found)}))
    return int(any(cells["prefix breaks"] for cells in rows))


if __name__ == "__main__":
    sys.exit(main())
