"""Megatron-core behind Gyre's trainer: the model, its attention, its weights. The only place that imports megatron.

Importing this package makes megatron-core importable on a machine without CUDA.
"""

from gyre.platform.cpu import install

install()
