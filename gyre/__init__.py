"""Gyre: online reinforcement learning of LLM agents through unmodified black-box harnesses."""

__version__ = "0.1.0"
