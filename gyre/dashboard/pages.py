"""What each page shows: the context of its template, from the view and the request. Every page is bounded."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gyre.core.records import Validity
from gyre.dashboard.view import ExecutionView, RunView
from gyre.report import tables
from gyre.report.facts import facts
from gyre.report.summary import ExecutionSummary, RunSummary
from gyre.report.text import excerpt, whole
from gyre.report.tree_lines import TreeLine, tree_lines

T = TypeVar("T")

ROWS = 100
"""Newest rows of a table of the overview."""
EXECUTIONS = 50
CALLS = 20
TREE_LINES = 200
DEEPEST = 12
"""Columns that the tree is indented by at most."""
TOKENS = 2000
"""Of one page of a call."""
RELOAD_S = 20
RUNNING = "running"
OUTCOMES = (RUNNING, *(validity.value for validity in Validity))


class Pager(msgspec.Struct, frozen=True, kw_only=True):
    page: int
    """From 1."""
    pages: int
    total: int
    query: str
    """The other parameters of the page, encoded, each ending in "&"."""


def overview(view: RunView, _: Request) -> dict[str, Any]:
    snapshot = view.snapshot()
    summary = snapshot.summary
    shown = [
        (tables.steps_table(summary), "/executions?step="),
        (tables.recovery_table(summary), ""),
        (tables.transitions_table(summary), ""),
        (tables.joins_table(summary), ""),
    ]
    return _base(view) | {
        "reload_s": RELOAD_S if summary.finished is None else None,
        "row": snapshot.row,
        "facts": facts(summary),
        "explanation": view.explanation(),
        "config": view.run.config.read_text(),
        "charts": view.charts(),
        "tables": [(_newest(table), link) for table, link in shown if table.rows],
        "last_written": view.last_written(),
    }


def executions(view: RunView, request: Request) -> dict[str, Any]:
    summary = view.snapshot().summary
    step, outcome = _step(request), _outcome(request)
    found = select(summary, step, outcome)[::-1]
    query = (f"step={step}&" if step is not None else "") + (f"outcome={outcome}&" if outcome else "")
    some, pager = _page(found, EXECUTIONS, request, query)
    return _base(view) | {
        "table": tables.executions_table(view.with_trees(some)),
        "pager": pager,
        "step": step,
        "outcome": outcome,
        "outcomes": OUTCOMES,
    }


def execution(view: RunView, request: Request) -> dict[str, Any]:
    name, found = _execution(view, request)
    lines = tree_lines(found.records)
    records, pager = _page(found.records, CALLS, request)
    decode = view.decode
    return _base(view) | {
        "execution": name,
        "outcome": None if found.outcome is None else tables.outcome_sentence(found.outcome),
        "assessments": [tables.assessment_sentence(assessment) for assessment in found.assessments],
        "tree": [(_indent(line), line, _place(line)) for line in lines[:TREE_LINES]],
        "tree_left_out": max(0, len(lines) - TREE_LINES),
        "table": tables.calls_table(records, {record.call_id: record.seq for record in found.records}),
        "texts": [
            (record, excerpt(record.delta_ids, decode), excerpt(record.output_ids, decode)) for record in records
        ],
        "pager": pager,
        "decoded": decode is not None,
    }


def call(view: RunView, request: Request) -> dict[str, Any]:
    name, found = _execution(view, request)
    seq = request.path_params["seq"]
    record = next((record for record in found.records if record.seq == seq), None)
    if record is None:
        raise HTTPException(404, f"ExecutionView {name} has no call {seq}; it has {len(found.records)} calls.")
    seq_of = {record.call_id: record.seq for record in found.records}
    tokens = [("in", token) for token in record.delta_ids] + [("out", token) for token in record.output_ids]
    some, pager = _page(tokens, TOKENS, request)
    decode = view.decode
    parts = [(kind, [token for of, token in some if of == kind]) for kind in ("in", "out")]
    return _base(view) | {
        "execution": name,
        "record": record,
        "parent": None if record.parent is None else seq_of.get(record.parent),
        "table": tables.calls_table([record], seq_of),
        "parts": [(kind, whole(ids, decode)) for kind, ids in parts if ids],
        "pager": pager,
        "decoded": decode is not None,
        "seconds": record.finished_at - record.started_at,
    }


def select(summary: RunSummary, step: int | None, outcome: str) -> list[ExecutionSummary]:
    """In the order of their start; `step` keeps the executions whose group that step consumed."""
    groups = {group for done in summary.steps if done.step == step for group in done.groups}
    return [
        execution
        for execution in summary.executions
        if (step is None or execution.group in groups)
        and (not outcome or outcome == (execution.outcome.value if execution.outcome else RUNNING))
    ]


def _base(view: RunView) -> dict[str, Any]:
    return {"run": view.run.root.name}


def _execution(view: RunView, request: Request) -> tuple[str, ExecutionView]:
    name = request.path_params["execution"]
    found = view.execution(name)
    if found is None:
        raise HTTPException(404, f"The run has no execution {name}.")
    return name, found


def _step(request: Request) -> int | None:
    text = request.query_params.get("step", "")
    return _whole_number("step", text) if text else None


def _outcome(request: Request) -> str:
    outcome = request.query_params.get("outcome", "")
    if outcome and outcome not in OUTCOMES:
        raise HTTPException(400, f"outcome={outcome} is none of {', '.join(OUTCOMES)}.")
    return outcome


def _page(items: Sequence[T], size: int, request: Request, query: str = "") -> tuple[list[T], Pager]:
    """The page of `items` that the request asks for; the first when it asks for none."""
    pages = max(1, -(-len(items) // size))
    page = _whole_number("page", request.query_params.get("page", "1"))
    if not 1 <= page <= pages:
        raise HTTPException(404, f"There is no page {page}; there are {pages}.")
    return list(items[(page - 1) * size : page * size]), Pager(page=page, pages=pages, total=len(items), query=query)


def _whole_number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise HTTPException(400, f"{name}={text} is not a whole number.")
    return int(text)


def _newest(table: tables.Table) -> tables.Table:
    left_out = len(table.rows) - ROWS
    if left_out <= 0:
        return table
    return msgspec.structs.replace(
        table,
        title=f"{table.title} (last {ROWS} of {len(table.rows)})",
        rows=table.rows[left_out:],
        bad=frozenset(index - left_out for index in table.bad if index >= left_out),
    )


def _indent(line: TreeLine) -> str:
    return "    " * (min(line.depth, DEEPEST) - 1) + "└── " if line.depth else ""


def _place(line: TreeLine) -> str:
    never = "" if line.calls[0].trainable else ", never a target"
    if line.parent_seq is None:
        return f"root{never}"
    if line.leaves_at is None:
        return f"continues call {line.parent_seq}{never}"
    return f"leaves call {line.parent_seq} after {line.leaves_at} tokens{never}"
