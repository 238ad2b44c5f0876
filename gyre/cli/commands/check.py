"""`gyre check`: the checks of `gyre train`, a line each; nothing is started."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.text import Text

from gyre import api
from gyre.cli.console import open_console
from gyre.core.errors import ConfigError
from gyre.core.system.output import STANDARD_OUTPUT, write_output


def check(
    path: Path | None, overrides: Sequence[str], run_dir: Path | None, resume: Path | None, json_out: Path | None
) -> int:
    """0 when every check passes, 2 otherwise. Raises ConfigError when the file is no configuration."""
    run, overrides = opened(path, overrides, resume)
    path = run.directory.config if run else path
    if path is None:
        raise ConfigError("name a config file, or a run with --resume")
    found = api.check(api.load_config(path, *overrides), str(path), run_dir=run_dir, resume=run)
    refused = sum(not finding.ok for finding in found)
    if json_out is not None:
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
        write_output(json_out, text + b"\n", "--json")
    if json_out == STANDARD_OUTPUT:
        return 2 if refused else 0
    console = open_console()
    for finding in found:
        mark = Text("ok     ", "green") if finding.ok else Text("refused", "red")
        console.print(Text.assemble(mark, "  ", finding.check), soft_wrap=True)
        if not finding.ok:
            console.print(f"         → {finding.problem}", soft_wrap=True, highlight=False, markup=False)
        for note in finding.notes:
            console.print(f"         note: {note}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"{refused} of {len(found)} checks failed." if refused else f"{path} can be trained.", soft_wrap=True)
    return 2 if refused else 0


def opened(path: Path | None, overrides: Sequence[str], resume: Path | None) -> tuple[api.Run | None, Sequence[str]]:
    """The run of --resume, and all overrides: then the first positional argument is an override already."""
    if resume is None:
        return None, overrides
    return api.Run(resume), [*([] if path is None else [str(path)]), *overrides]
