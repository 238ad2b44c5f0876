"""What holds for all tests.

Property tests are not judged by the clock: machines are shared, and a slow example proves nothing.
"""

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("gyre", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# `make fuzz`: the tests of test_proxy_fuzz.py send about 14,000 bodies together.
settings.register_profile("nightly", settings.get_profile("gyre"), max_examples=1250, database=None)
settings.load_profile("gyre")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the imports make, a million objects, stays to the end: the garbage collector need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
