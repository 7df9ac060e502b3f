import json
import pickle

import numpy as np
import pytest

from megatron_packing.data import Encoder, MockSource
from megatron_packing.errors import ConfigError
from tests.pure.data_toys import EOS, Toy, surveyed

UNIFORM = {"mode": "distribution", "type": "uniform", "min_seq_len": 3, "max_seq_len": 9}
LOGNORMAL = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 10,
    "max_seq_len": 4000,
    "mean_seq_len": 300,
    "lognormal_sigma": 0.8,
}


def mock(config, seed=3, vocab_size=40, **more):
    return MockSource(config, vocab_size, seed, eos_id=EOS, seq_length=16, **more)


def lengths(source, rows):
    return np.array([len(source[row]) - 1 for row in range(rows)])


def test_a_row_depends_on_seed_and_number_alone():
    source = mock(UNIFORM)
    rows = [source[row].tolist() for row in range(50)]
    again = pickle.loads(pickle.dumps(source))
    np.random.seed(0)
    assert [again[row].tolist() for row in reversed(range(50))] == rows[::-1]
    assert len({tuple(row) for row in rows}) > 40
    assert [mock(UNIFORM, seed=4)[row].tolist() for row in range(50)] != rows
    assert len(pickle.dumps(mock(UNIFORM, rows=10**9))) < 1000
    source[0][:] = 0
    assert source[0].tolist() == rows[0]


def test_ids_climb_by_one_step_and_end_in_the_only_eos():
    for row in range(100):
        ids = mock(UNIFORM)[row]
        assert ids.dtype == np.int64
        assert ids[-1] == EOS
        body = ids[:-1]
        assert ((body >= 0) & (body < 40) & (body != EOS)).all()
        places = body - (body > EOS)  # EOS taken out of the vocabulary
        assert len(set(np.diff(places) % 39)) <= 1


def test_distributions_keep_their_bounds_and_mean():
    assert set(lengths(mock(UNIFORM), 300)) == set(range(3, 10))
    drawn = lengths(mock(LOGNORMAL), 2000)
    assert drawn.min() >= 10
    assert drawn.max() <= 4000
    assert abs(drawn.mean() / 300 - 1) < 0.1  # 4 standard errors: 0.95 / sqrt(2000) = 0.021 of the mean each
    default = lengths(mock(None), 300)
    assert (default.min(), default.max()) == (8, 16)
    assert len(mock(None)) == 1_000_000


@pytest.mark.parametrize("text", ["5,6\n7\n", "length\n5\n6\n7", "5\r\n6\r\n\r\n7,\n", "\ufeff5,6,7"])
def test_lengths_from_a_file(tmp_path, text):
    path = tmp_path / "lengths.csv"
    path.write_bytes(text.encode())
    source = mock({"mode": "file", "path": str(path)})
    assert len(source) == 3
    assert lengths(source, 3).tolist() == [5, 6, 7]
    with pytest.raises(IndexError):
        source[3]


def test_a_configuration_may_be_text_or_a_file(tmp_path):
    config = {"mode": "lengths", "lengths": [4, 2]}
    path = tmp_path / "mock.json"
    path.write_text(json.dumps(config))
    for given in (config, json.dumps(config), str(path)):
        assert lengths(mock(given), 2).tolist() == [4, 2]


def test_mock_rows_take_the_way_of_all_rows():
    found = surveyed(mock(None), Encoder(Toy(), 16), limit=50)
    assert (found.samples, found.skipped, found.truncated) == (50, {}, 0)
    assert found.targets == found.tokens
    cut = surveyed(mock({"mode": "lengths", "lengths": [20, 5, 1]}), Encoder(Toy(), 16, "truncate"))
    assert cut.lengths.tolist() == [16, 5, 1]
    assert cut.truncated == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"mode": "verification", "data_path": "x"}, "verification"),
        ({"mode": "dream"}, r"'dream' is unknown. Known are distribution/lognormal"),
        ({}, "'None' is unknown"),
        ({"mode": "distribution", "type": "normal"}, "'distribution/normal' is unknown"),
        (UNIFORM | {"mean_seq_len": 4}, "unknown 'mean_seq_len'. Its keys are mode, type, min_seq_len, max_seq_len"),
        ({"mode": "file"}, "no 'path'"),
        ({"mode": "file", "path": "/gone.csv"}, "gone.csv"),
        ({"mode": "lengths", "lengths": []}, "no lengths"),
        ({"mode": "lengths", "lengths": [3, 0]}, "0 at place 2"),
        ({"mode": "lengths", "lengths": [True]}, "True at place 1"),
        (UNIFORM | {"min_seq_len": 10}, "1 <= min <= max"),
        (LOGNORMAL | {"lognormal_sigma": 0}, "lognormal_sigma is 0"),
        (LOGNORMAL | {"mean_seq_len": "many"}, "mean_seq_len is 'many'"),
        ("{", "not valid JSON"),
        ("gone.json", "neither a JSON object nor a readable file"),
    ],
)
def test_configurations_that_mean_nothing_are_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        mock(config)


@pytest.mark.parametrize("bad", [{"vocab_size": 1}, {"vocab_size": 7}, {"seed": -1}])
def test_a_vocabulary_must_hold_eos_and_more(bad):
    with pytest.raises(ConfigError, match="Mock data"):
        mock(UNIFORM, **bad)
