from collections.abc import Iterator

import pytest

from tests.gloo.pool import GlooPool


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Four ranks, started once for all tests."""
    four = GlooPool(4)
    four.start()
    yield four
    four.close()
