"""Tokenizer and renderers that tests of chat, trajectories and samples share."""

import pytest
from trajectory_helpers import make_tokenizer

from gyre.chat.render import ChatRenderer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """The quickstart's family: Qwen3 without thinking."""
    return ChatRenderer(tokenizer, "qwen3", thinking=False)


@pytest.fixture(scope="session")
def thinking_renderer(tokenizer):
    return ChatRenderer(tokenizer, "qwen3", thinking=True)
