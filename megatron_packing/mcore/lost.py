"""Which rows does a step lose or cut, and why? Counted by reason over all data-parallel ranks.

Ranks do not know which reasons others will meet, and an ordinary step must not pay for asking. So every rank keeps the
same list of reasons met so far, and the counts of those travel with the step's lengths. Only where some rank has an
example to tell, of which there are at most three a reason, do all ranks exchange texts: one collective more, a few
times in a run.
"""

import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_packing.comm.texts import all_gather_texts
from megatron_packing.data.survey import EXAMPLES

TRUNCATED = "truncated"
"""The name that samples which were cut are counted under; every other reason is one for dropping a row."""


OTHER = "other"
"""What reasons beyond the first `_MOST_REASONS` are counted under."""

_MOST_REASONS = 64
"""A user's dataset may name a reason of its own for every row; each costs a number in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostInStep:
    """What a step lost, over all data-parallel ranks; the same on each of them."""

    counts: Counter[str]
    """Reason -> rows."""
    news: tuple[tuple[str, str], ...]
    """(reason, "file:line: why") of rows worth telling: the first few of each reason."""

    @property
    def truncated(self) -> int:
        """Rows of which samples were cut."""
        return self.counts[TRUNCATED]

    @property
    def dropped(self) -> int:
        """Rows that made no sample."""
        return self.counts.total() - self.truncated


@dataclass(slots=True)
class Lost:
    """What one rank lost in one step."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, item: dict[str, Any]) -> bool:
        """Take in one item of the loader; whether it makes no sample."""
        dropped = "dropped" in item
        if dropped or "truncated" in item:
            reason = _only(item["dropped"]) if dropped else TRUNCATED
            self.counts[reason] += 1
            told = self.examples.setdefault(reason, [])
            if len(told) < EXAMPLES:
                told.append(_only(item.get("why", "(the dataset does not say which)")))
        return dropped

    def name_all_others(self, known: Container[str]) -> None:
        """Count every reason for dropping that is not known as `OTHER`."""
        for reason in [one for one in self.counts if one not in known and one not in (OTHER, TRUNCATED)]:
            self.counts[OTHER] += self.counts.pop(reason)
            told = self.examples.setdefault(OTHER, [])
            told += self.examples.pop(reason)[: EXAMPLES - len(told)]


class LostRows:
    """What all ranks know of lost rows, step after step.

    Args:
        group: the data-parallel group; None for a single rank.
        device: where its backend wants its tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        self._where: dict[str, Any] = {"group": group, "device": device}
        self._told: dict[str, int] = {}
        """Reason -> examples told so far. The same on all ranks, in the same order."""

    def counters(self, mine: Lost) -> tuple[int, ...]:
        """What this rank adds to a sum over the ranks: whether it has news, and its counts by reason met before."""
        if len(self._told) >= _MOST_REASONS:
            mine.name_all_others(self._told)
        return (int(bool(self._untold(mine))), *(mine.counts[reason] for reason in self._told))

    def share(self, mine: Lost, counters: Sequence[int]) -> LostInStep:
        """What the step lost. Called on every rank with the sums of `counters`; a collective if any rank has news."""
        anyones_news, *of_known = counters
        counts = Counter({reason: count for reason, count in zip(self._told, of_known, strict=True) if count})
        if not anyones_news:
            return LostInStep(counts=counts, news=())
        untold = self._untold(mine)
        unknown = {reason: mine.counts[reason] for reason in untold if reason not in self._told}
        texts = all_gather_texts(json.dumps([unknown, untold]), **self._where)
        news: list[tuple[str, str]] = []
        for text in texts:
            of_rank, examples = json.loads(text)
            counts.update(of_rank)
            news += [(reason, why) for reason, lines in examples.items() for why in lines]
        return LostInStep(counts=counts, news=tuple(self._worth_telling(news)))

    def untell(self, lost: LostInStep) -> None:
        """Forget what a step told that will be packed anew. Called on every rank."""
        for reason, _ in lost.news:
            self._told[reason] -= 1
        self._told = {reason: told for reason, told in self._told.items() if told}

    def _untold(self, mine: Lost) -> dict[str, list[str]]:
        return {reason: lines for reason, lines in mine.examples.items() if self._told.get(reason, 0) < EXAMPLES}

    def _worth_telling(self, news: list[tuple[str, str]]) -> list[tuple[str, str]]:
        kept = []
        for reason, why in news:
            told = self._told.setdefault(reason, 0)
            if told < EXAMPLES:
                self._told[reason] = told + 1
                kept.append((reason, why))
        return kept


def _only(value: Any) -> str:
    return str(value[0] if isinstance(value, list | tuple) else value)
