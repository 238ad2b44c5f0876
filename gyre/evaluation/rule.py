"""Which assessment of an execution is designated: a pure rule over the last word of every evaluator."""

from collections.abc import Mapping

import msgspec

from gyre.core.records import Assessment
from gyre.evaluation.config import EvaluationSection


def designates(section: EvaluationSection, earlier: Mapping[str, Assessment], assessment: Assessment) -> bool:
    """Whether an assessment is designated as it comes; `earlier` are the evaluators before it. With the rules that
    combine, none is."""
    return section.rule == "first" and assessment.valid and not any(other.valid for other in earlier.values())


def combined(section: EvaluationSection, last: Mapping[str, Assessment]) -> Assessment | None:
    """The designated assessment of the rules that combine, from each evaluator's last one by name; None when one of
    them says nothing: the others alone would give a reward of another meaning."""
    if section.rule == "first":
        return None
    weights = {evaluator.called: evaluator.weight for evaluator in section.evaluators}
    scores = {name: last[name].score for name in weights if name in last and last[name].valid}
    known = {name: score for name, score in scores.items() if score is not None}
    if len(known) < len(weights):
        return None
    if section.rule == "min":
        score = min(known.values())
    else:
        share = sum(weights.values())
        score = sum(value * weights[name] / share for name, value in known.items())
    return msgspec.structs.replace(
        next(iter(last.values())),
        evaluator=f"{section.rule} of {', '.join(known)}",
        version="",
        score=score,
        valid=True,
        designated=True,
        detail=known,
        error="",
        fault="",
        flags=sorted({flag for assessment in last.values() for flag in assessment.flags}),
        usage={},
        seconds=0.0,
    )
