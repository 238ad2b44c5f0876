"""Isolation of harnesses and verifiers (docs/outcomes.md)."""

from gyre.sandboxes.base import PROXY_URL, ExecResult, Mount, Sandbox, SandboxLimits, SandboxSpec
from gyre.sandboxes.bubblewrap import BubblewrapSandbox

__all__ = ["PROXY_URL", "BubblewrapSandbox", "ExecResult", "Mount", "Sandbox", "SandboxLimits", "SandboxSpec"]
