"""`gyre new`: working skeletons, each with a test that passes. The texts are the files of `skeletons/`."""

import re
import shutil
from pathlib import Path

from gyre.core.errors import ConfigError
from gyre.core.places import carried

SKELETONS = Path(__file__).parents[1] / "skeletons"
NAME = "name_of_it"
SUFFIXES = {"harness": ".toml", "config": ".toml", "reward": ".py", "task": ""}
MAIN = {"harness": "profile.toml", "reward": "reward.py"}
EXAMPLE = "quickstart.toml"


def new(kind: str, path: Path) -> int:
    """Raises ConfigError when the path is taken, cannot be written, or has a name that the kind cannot have."""
    path = path.absolute()
    suffix, name = SUFFIXES[kind], path.stem if SUFFIXES[kind] else path.name
    if path.suffix != suffix:
        raise ConfigError(f"{path}: a {kind} is a {f'file that ends in {suffix}' if suffix else 'directory'}")
    if not re.fullmatch(r"[A-Za-z_]\w*" if kind == "reward" else r"[\w.-]+", name):
        raise ConfigError(f"{path}: {name!r} cannot be the name of a {kind}; use letters, digits and _")
    test = path.parent / f"test_{name.replace('-', '_').replace('.', '_')}.py"
    for taken in [path] if kind == "task" else [path, test]:
        if taken.exists():
            raise ConfigError(f"{taken} exists: choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "task":
            shutil.copytree(SKELETONS / kind, path, ignore=shutil.ignore_patterns("__pycache__"))
            manifest = path / "task.toml"
            manifest.write_text(manifest.read_text().replace(NAME, name))
            test = path / "test_task.py"
        else:
            path.write_text(_main(kind).replace(NAME, name))
            (template,) = (SKELETONS / kind).glob("test_*.py")
            test.write_text(template.read_text().replace(NAME, name))
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be written ({error.strerror}): choose another path"
        ) from None
    print(f"Made {path}\nTest: pytest {test}")
    return 0


def _main(kind: str) -> str:
    if kind != "config":
        return (SKELETONS / kind / MAIN[kind]).read_text()
    # The example, from wherever it is: its own paths are relative to it.
    examples = carried("examples")
    text = (examples / EXAMPLE).read_text()
    return re.sub(r'^(model|root) = "([^"]+)"', lambda m: f'{m[1]} = "{examples / m[2]}"', text, flags=re.MULTILINE)
