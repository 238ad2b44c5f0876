"""Where Gyre's own files are: beside the package in a checkout, inside it in a wheel."""

import os
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
DISTRIBUTION = "gyre-rl"
CACHE_VARIABLE = "GYRE_CACHE"


def checkout() -> Path | None:
    """Root of the checkout that this package is part of; None for an installed wheel."""
    manifest = PACKAGE.parent / "pyproject.toml"
    try:
        name = tomllib.loads(manifest.read_text())["project"]["name"]
    except (OSError, ValueError, KeyError):
        return None
    return PACKAGE.parent if name == DISTRIBUTION else None


def cache_root() -> Path:
    """Where harnesses and models are kept: `$GYRE_CACHE`; or `.cache` of a checkout; or the user's own cache."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).absolute()
    if (root := checkout()) is not None:
        return root / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre"


def carried(name: str) -> Path:
    """The directory `examples` or `requirements`."""
    return (checkout() or PACKAGE) / name
