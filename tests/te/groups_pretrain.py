"""contract_pretrain.py with context parallelism in fp32, whose rounding hides nothing; we refuse it, as it has none."""

import functools
from dataclasses import replace
from typing import Any

from megatron_packing.mcore import te_versions
from tests.te import contract_pretrain, standin


def say_that_it_is_half_precision() -> None:
    ask = te_versions.asked_of

    @functools.wraps(ask)
    def asked_of(*args: Any, **keywords: Any) -> te_versions.Asked:
        return replace(ask(*args, **keywords), half_precision=True)

    te_versions.asked_of = asked_of


if __name__ == "__main__":
    say_that_it_is_half_precision()
    with standin.fused_in_fp32():
        contract_pretrain.main()
