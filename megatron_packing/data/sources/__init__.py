"""Which rows does a file hold, and what stands in row i? Rows are found by place, never loaded as a whole.

One kind of file a module; `open_source` chooses. What took long to find out about a file is kept beside it or under
`--data-cache-path` and shared by ranks and workers (`index`, `cache`).
"""

from megatron_packing.data.sources.hub import ArrowSource
from megatron_packing.data.sources.json_list import JsonListSource
from megatron_packing.data.sources.lines import JsonlSource
from megatron_packing.data.sources.many import ManySource
from megatron_packing.data.sources.opening import open_source
from megatron_packing.data.sources.parquet import ParquetSource
from megatron_packing.data.sources.record import Record, Source

__all__ = [
    "ArrowSource",
    "JsonListSource",
    "JsonlSource",
    "ManySource",
    "ParquetSource",
    "Record",
    "Source",
    "open_source",
]
