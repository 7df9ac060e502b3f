"""One rank does the long work, the others wait for it, and its failure is theirs."""

from pathlib import Path

import pytest

from tests.gloo import tasks
from tests.gloo.pool import GlooPool

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("builder", [0, 2])
def test_one_rank_finds_the_rows_and_the_others_find_its_index(pool: GlooPool, tmp_path: Path, builder: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 7)
    answers = pool.run(tasks.open_after_a_turn, str(path), builder)
    assert answers == [("returned", (7, int(rank == builder))) for rank in range(pool.size)]


def test_its_failure_reaches_all(pool: GlooPool, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n")
    answers = pool.run(tasks.open_after_a_turn, str(path), 1)
    kinds = ["ConfigError" if rank == 1 else "PackingError" for rank in range(pool.size)]
    assert [kind for kind, _ in answers] == kinds
    assert all(f"{path} holds no rows" in text for _, text in answers)
