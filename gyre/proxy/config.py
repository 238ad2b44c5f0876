"""Configuration of a proxy worker."""

import msgspec

from gyre.core.policy import PolicySection, RolloutSection


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_dir: str
    """Records go into its `gyre.sqlite`."""
    policy: PolicySection
    rollout: RolloutSection
    replay_routing: bool = False
    """Records hold the experts that the engines chose; the engines must have been started to tell them."""
    socket: str
    """Unix socket of the HTTP routes, for sandboxes. "" opens none."""
    keepalive_s: float = 10.0
    """Longest silence on an open answer; also how long the status line waits for a first token or an error."""
    coalesce_s: float = 0.03
    """Tokens that arrive within this time go out together."""
    hold_timeout_s: float = 900.0
    stall_timeout_s: float = 300.0
    drain_timeout_s: float = 10.0
    handoff_timeout_s: float = 10.0
    client_timeout_s: float = 300.0
    """How long a client may take to send its request, and to read what was sent to it."""
    max_body_bytes: int = 64 * 2**20
    max_calls_per_session: int = 32
    """Running calls of one execution, and requests of it that are arriving; more are answered with 429."""
