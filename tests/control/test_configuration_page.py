"""docs/configuration.md names every key of a run's configuration, with its default; TOML in docs loads."""

import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.control.live.config import RunConfig
from gyre.core.config import decode
from gyre.harnesses import load_profile

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/configuration.md"


def keys_of(kind: Any, section: str) -> dict[str, str]:
    """Key, with its section and kind, → default as the page writes it."""
    found: dict[str, str] = {}
    hints = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        annotation = hints[field.name]
        options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        options = sum((listed(option) for option in options), ())
        structs = [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]
        for struct in structs:
            name = f"{section}.{field.name}".strip(".")
            tag = struct.__struct_config__.tag
            found |= keys_of(struct, f"{name}:{tag}" if tag else name)
        if not structs or "tuple" in str(annotation):
            found[f"{section}.{field.name}".strip(".")] = written(field)
    return found


def listed(annotation: Any) -> tuple[Any, ...]:
    """What a list of tagged structs may hold; anything else is itself."""
    if typing.get_origin(annotation) is not tuple:
        return (annotation,)
    inner = typing.get_args(annotation)[0]
    return typing.get_args(inner) or (inner,)


def written(field: Any) -> str:
    if field.required:
        return "–"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "none" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def keys_on_the_page() -> dict[str, str]:
    found: dict[str, str] = {}
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            name, kind = re.search(r"`\[(.+?)\]`", line), re.search(r'`kind = "(\w+)"`', line)
            section = (name[1] if name else "") + (f":{kind[1]}" if kind else "")
        elif row := re.match(r"\| `(\w+)` \| (.+?) \|", line):
            found[f"{section}.{row[1]}".strip(".")] = row[2]
    return found


def test_the_page_has_every_key_with_its_default() -> None:
    assert keys_on_the_page() == keys_of(RunConfig, "")


def toml_of(page: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", ["cluster.md", "engines.md", "training.md"])
def test_sections_that_a_page_shows_load_in_the_quickstart(page: str) -> None:
    quickstart = tomllib.loads((REPOSITORY / "examples/quickstart.toml").read_text())
    blocks = toml_of(page)
    assert blocks
    for block in blocks:
        shown = tomllib.loads(block)
        chosen = [section for section, values in shown.items() if "kind" in values]
        for section in chosen:
            quickstart.pop(section, None)
        merged = quickstart | {section: quickstart.get(section, {}) | values for section, values in shown.items()}
        decode(merged, RunConfig, where=page, base=REPOSITORY / "examples")


def test_the_agent_that_a_page_shows_is_a_profile_and_a_program(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(toml_of("harnesses.md")[0])
    profile = load_profile(str(tmp_path / "mine.toml"))
    compile(profile.files["agent.py"], "agent.py", "exec")
