"""One process that forks, with Transformer Engine's Python in memory; scripts/test.sh runs this folder on its own."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.runs.conftest import chats  # noqa: F401
from tests.runs.harness import Runner


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    try:
        metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        skip = pytest.mark.skip(reason="needs Transformer Engine's Python: scripts/test.sh runs it, see setup_te.sh")
        for item in items:
            if item.path.is_relative_to(here):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("runs"), preload="tests.te.preload")
    yield runner
    runner.close()
