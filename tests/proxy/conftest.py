from typing import Any

import pytest
from hypothesis import settings
from proxy_fakes import make_tokenizer

# `make fuzz`: eleven tests of test_proxy_fuzz.py, 25,000 bodies together.
settings.register_profile("nightly", max_examples=1250, deadline=None, database=None)


@pytest.fixture(scope="session")
def proxy_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
