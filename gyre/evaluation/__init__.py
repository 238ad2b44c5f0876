"""Grading of preserved workspaces (docs/outcomes.md).

Read `base` (what is graded, and what a grading says), `tests` (the task's own grader), `settling` (whose fault it is
when that gives no reward), `hook` and `judge` (other evaluators), `rule` (which assessment is designated), `config`.
"""

from gyre.evaluation.artifact import digest
from gyre.evaluation.base import Evaluator, Preserved
from gyre.evaluation.config import EvaluationSection
from gyre.evaluation.evaluators import Evaluators
from gyre.evaluation.reward import InvalidReward, read_reward

__all__ = ["EvaluationSection", "Evaluator", "Evaluators", "InvalidReward", "Preserved", "digest", "read_reward"]
