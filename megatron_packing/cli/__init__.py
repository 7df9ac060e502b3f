"""The `megatron-packing` command."""
