"""Unmodified agent harnesses, described as data: a new one is a profile, not code (docs/architecture.md)."""

from gyre.harnesses.install import check, default_root, install, prefix_of
from gyre.harnesses.launch import HarnessLaunch, prepare
from gyre.harnesses.profile import HarnessProfile, Install, load_profile, profile_names
from gyre.harnesses.window import ContextWindow

__all__ = [
    "ContextWindow",
    "HarnessLaunch",
    "HarnessProfile",
    "Install",
    "check",
    "default_root",
    "install",
    "load_profile",
    "prefix_of",
    "prepare",
    "profile_names",
]
