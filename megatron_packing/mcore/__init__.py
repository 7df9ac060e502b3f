"""The only room that imports Megatron: flags, datasets, parameters, hooks, and the CPU runtime."""
