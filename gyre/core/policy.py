"""[policy] and [rollout] of a run's configuration: what is trained, and how answers are sampled.

Every component reads them: the proxy renders and bounds calls, engines size their context, trainers score with the same
temperature, harnesses are told the window.
"""

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gyre.core.config import Positive


class PolicySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy]: what is trained."""

    RENAMED_KEYS: ClassVar[dict[str, str]] = {"renderer": "family"}

    model: Path
    """Hugging Face directory: config.json, safetensors, tokenizer. Nothing is downloaded."""
    family: str
    """Family of the chat template, as `gyre.chat.families` names it."""
    thinking: bool = False


class RolloutSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[rollout]: the distribution of behaviour and its bounds; the harness cannot change them. Engines sample the whole
    distribution, so that behaviour log-probs are exact: there is no top_p."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0
    max_context: Positive
    """Tokens of prompt plus answer; a longer conversation gets the API's own overflow error."""
    max_new_tokens: Positive
    """Tokens of one answer; the harness may ask for less, never for more."""
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Also serve harnesses on this loopback TCP port; by default only sandboxes reach the proxy."""
    proxy_workers: Positive = 1
    """Processes that executions are spread over, each with a core's worth of calls: docs/benchmarks.md, "Proxy"."""
