"""What is asked of a run's data: refused before anything is read where it cannot be had; told where it can."""

from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import Split

from megatron_packing import VarlenDataset
from megatron_packing.config import PackingConfig
from megatron_packing.errors import ConfigError
from megatron_packing.mcore import feed
from megatron_packing.mcore.supply import check_requests, describe_order
from megatron_packing.topology import Topology
from tests.torch.test_dataset import _config

A, B = (["a"], None), (["b"], None)
AB, WEIGHTED = (["a", "b"], None), (["a", "b"], [1.0, 2.0])
ASKED = (100, 8, 8)


def settings(**changes: Any) -> PackingConfig:
    usual = {"topology": Topology(), "seq_length": 8, "scheduler": "first_fit", "max_tokens_per_rank": 8}
    return PackingConfig(**{**usual, **changes})  # type: ignore[arg-type]


def complaint(blends: Any, asked: Any = ASKED, *, several: bool = False, **changes: Any) -> str | None:
    data = {"blend_per_split": blends, "split": None} if isinstance(blends, list) else {"blend": blends}
    try:
        check_requests(settings(**changes), _config(**data), asked, several=several)
    except ConfigError as error:
        return str(error)
    return None


FINE: list[tuple[Any, dict[str, Any]]] = [
    (A, {}),
    (None, {}),  # made-up data
    (WEIGHTED, {}),
    ([A, B, None], {}),
    ([A, None, None], {"asked": (100, 0, 0)}),
    ([A, AB, B], {"full_validation": True}),
    ([WEIGHTED, AB, None], {"full_validation": True, "several": True}),
    (AB, {"shuffle": True}),
    (A, {"order": "cyclic"}),
    (WEIGHTED, {"order": "cyclic"}),
]
REFUSED: list[tuple[Any, dict[str, Any], list[str]]] = [
    ([A, None, None], {}, ["nothing to evaluate", "--valid-data-path", "--eval-iters 0"]),
    ([A, None, None], {"full_validation": True, "asked": (100, 0, 0)}, ["nothing to evaluate"]),
    ([A, WEIGHTED, None], {"full_validation": True}, ["--full-validation", "weights"]),
    (WEIGHTED, {"full_validation": True}, ["--full-validation", "weights"]),
    ([A, AB, None], {"several": True}, ["--multiple-validation-sets", "--full-validation"]),
    (AB, {"several": True, "full_validation": True}, ["--multiple-validation-sets", "--valid-data-path"]),
    ([A, AB, B], {"several": True, "full_validation": True}, ["--multiple-validation-sets", "--test-data-path"]),
    (
        [A, AB, None],
        {"several": True, "full_validation": True, "topology": Topology(pp=2, vpp=2)},
        ["--multiple-validation-sets", "interleaved"],
    ),
    (AB, {"order": "cyclic"}, ["--dataloader-type cyclic", "leave out", "--packing-shuffle"]),
]


@pytest.mark.parametrize(("blends", "request_"), FINE)
def test_what_can_be_had(blends: Any, request_: dict[str, Any]) -> None:
    assert complaint(blends, **request_) is None


@pytest.mark.parametrize(("blends", "request_", "words"), REFUSED)
def test_what_cannot_be_had(blends: Any, request_: dict[str, Any], words: list[str]) -> None:
    said = complaint(blends, **request_)
    assert said is not None
    assert all(word in said for word in words), said


def dataset(rows: int, num_samples: int | None) -> VarlenDataset:
    return VarlenDataset(list(range(rows)), "rows", np.arange(rows), num_samples, Split.train, _config())


def test_the_order_and_the_end_of_an_epoch_are_told() -> None:
    def told(data: Any, **changes: Any) -> str:
        return describe_order(settings(**changes), data, step=4, seed=7)

    assert told(dataset(10, 100)).startswith(
        "order: as the rows stand in the file; an epoch of 10 rows is 2 steps of 4"
    )
    assert "2 rows left" in told(dataset(10, 100))
    assert "shuffled in each epoch, seed 7" in told(dataset(10, 100), shuffle=True)
    assert "cyclic" in told(dataset(10, 100), order="cyclic")
    assert "an epoch of 15 rows" in told(
        BlendedDataset([dataset(10, None), dataset(5, None)], [10, 5], None, _config())
    )
    weighted = BlendedDataset([dataset(10, 60), dataset(5, 60)], [0.5, 0.5], 100, _config())
    assert "each file of the blend begins anew" in told(weighted)


def test_evaluation_is_packed_under_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Place:
        has_packs = True

    class Asked(Exception):
        """Carries the settings of the packer that was asked."""

    class Packer:
        def __init__(self, config: PackingConfig, *_: Any) -> None:
            self.config = config

        def pack(self, *_: Any) -> None:
            raise Asked(self.config)

    monkeypatch.setattr(feed, "_find_place", Place)
    monkeypatch.setattr(feed, "_who_draws", lambda *_: None)
    monkeypatch.setattr(feed, "_make_packer", Packer)
    monkeypatch.setattr(feed, "share_packs", lambda *_, failure: (_ for _ in ()).throw(failure))
    config = settings(eval_scheduler="dp_balanced", eval_max_tokens_per_rank=32, eval_overlong="drop")
    feeder = feed.StepFeeder(config, [])
    asked = {}
    for training in (True, False):
        with pytest.raises(Asked) as caught:
            feeder.feed(iter(()), 1, training=training)
        (asked[training],) = caught.value.args
    assert asked[True] == config
    assert (asked[False].scheduler, asked[False].capacity, asked[False].overlong) == ("dp_balanced", 32, "drop")
