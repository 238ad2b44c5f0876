"""Isolation of harnesses and verifiers (docs/outcomes.md)."""

from gyre.sandboxes.base import PROXY_URL, ExecResult, Mount, Sandbox, SandboxProvider, SandboxSpec
from gyre.sandboxes.bubblewrap import BubblewrapSandbox
from gyre.sandboxes.config import SandboxLimits, SandboxSection
from gyre.sandboxes.containers.images import Image, ImageSpec
from gyre.sandboxes.provider import BubblewrapProvider, open_provider

__all__ = [
    "PROXY_URL",
    "BubblewrapProvider",
    "BubblewrapSandbox",
    "ExecResult",
    "Image",
    "ImageSpec",
    "Mount",
    "Sandbox",
    "SandboxLimits",
    "SandboxProvider",
    "SandboxSection",
    "SandboxSpec",
    "open_provider",
]
