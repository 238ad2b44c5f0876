"""Grading of preserved workspaces (docs/outcomes.md)."""

from gyre.evaluation.artifact import digest
from gyre.evaluation.base import Evaluator, Preserved
from gyre.evaluation.config import EvaluationSection
from gyre.evaluation.evaluators import Evaluators
from gyre.evaluation.reward import InvalidReward, read_reward

__all__ = ["EvaluationSection", "Evaluator", "Evaluators", "InvalidReward", "Preserved", "digest", "read_reward"]
