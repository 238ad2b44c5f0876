"""Gyre: online reinforcement learning of LLM agents through unmodified black-box harnesses."""
