"""Grading of preserved workspaces (docs/outcomes.md)."""

from gyre.evaluation.artifact import digest
from gyre.evaluation.config import EvaluationSection
from gyre.evaluation.evaluator import EVALUATOR, Evaluator, Preserved
from gyre.evaluation.reward import InvalidReward, read_reward

__all__ = ["EVALUATOR", "EvaluationSection", "Evaluator", "InvalidReward", "Preserved", "digest", "read_reward"]
