"""Fixtures of tests that run the proxy's code."""

from typing import Any

import pytest
from proxy_fakes import make_tokenizer


@pytest.fixture(scope="session")
def proxy_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
