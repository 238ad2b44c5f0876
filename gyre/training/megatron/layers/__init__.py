"""The layers of a policy over packed trees, on Megatron's parallel groups."""
