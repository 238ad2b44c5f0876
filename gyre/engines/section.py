"""[engine] of a run's configuration: which engine, and its memory and batching.

`kind` chooses. A section knows the worker that serves it and becomes part of that worker's config.
"""

from gyre.engines.local.config import LocalSection
from gyre.engines.sglang.config import SglangSection

EngineSection = LocalSection | SglangSection
