"""What did `megatron-packing plan` find out? Everything that its tables, its page and its JSON show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packing.cli.baselines import Baseline
from megatron_packing.cli.capacity_advice import Advice
from megatron_packing.cli.padded import PaddedAccount
from megatron_packing.cli.planning import Planned, Recommended, Setting


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanReport:
    """The figures of one call."""

    source: str
    """What the lengths are of."""
    setting: Setting
    steps: Sequence[npt.NDArray[np.int64]]
    """Of each step the samples' lengths in tokens; at least one step, all of one size."""
    account: PaddedAccount
    """Of all steps together."""
    baselines: Mapping[str, Baseline]
    """Ways to batch without packing, by name."""
    planned: Mapping[str, Planned]
    """Scheduler -> what it makes of the steps; at least one."""
    recommended: Recommended | None
    advice: Advice | None

    @property
    def samples(self) -> int:
        """Samples of all steps."""
        return len(self.steps) * len(self.steps[0])
