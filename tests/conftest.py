"""Fixtures and profiles that all tests share."""

import os
import tempfile

import hypothesis
import pytest

from rank_pool import RankPool

_COMMON = {
    "deadline": None,  # ranks share few cores; time limits are those of pytest-timeout and of the rank pool
    "print_blob": True,
    "suppress_health_check": [
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
}
hypothesis.settings.register_profile("ci", max_examples=250, derandomize=True, **_COMMON)
# Kernels are compiled for each hidden size and dtype that is drawn.
hypothesis.settings.register_profile("gpu", max_examples=5, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("nightly", max_examples=5000, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Tests leave nothing in the cache of whoever runs them, and find nothing there.
_cache = tempfile.TemporaryDirectory(prefix="deep-ep-tests-")
os.environ["DEEP_EP_CACHE_DIR"] = _cache.name


@pytest.fixture(scope="session")
def pool():
    """Ranks to run functions on; see `rank_pool.RankPool.run`."""
    pool = RankPool()
    yield pool
    pool.close()
