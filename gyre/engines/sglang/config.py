"""What the adapter of an SGLang server needs to know."""

import msgspec


class SglangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_url: str
    """Of a running server, for example "http://127.0.0.1:30000". For `release` to free anything it must have been
    started with --enable-memory-saver; --incremental-streaming-output must be off. The end-of-sequence ids of its model
    config and tokenizer stop a request besides the request's own."""
    model_dir: str
    """Hugging Face directory with the files beside the weights; the server must see it under the same path."""
    exchange_dir: str
    """Directory that the server can read; holds one view per update: `model_dir`'s files and the published weights."""
    max_context: int
    """The server's --context-length."""
    control_timeout_s: float = 600.0
    """For pauses, updates and releases. Generation has no timeout of its own: its callers have."""
