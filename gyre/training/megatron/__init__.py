"""Megatron-core behind Gyre's trainer: the model, its attention, its weights. The only place that imports megatron.

Importing this package makes megatron-core importable on a machine without CUDA.
"""

import logging
import warnings

from gyre.platform.cpu import install

# Megatron says at import, module by module, that it falls back to torch; Gyre asks for exactly that.
warnings.filterwarnings("ignore", message="(Apex|Transformer Engine)", category=UserWarning)
logging.getLogger("megatron").setLevel(logging.WARNING)
install()
