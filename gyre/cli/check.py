"""`gyre check`: the checks of `gyre train`, a line each; nothing is started."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from gyre.control.live.config import RunConfig
from gyre.control.live.preflight import findings
from gyre.core import config as configs
from gyre.core.output import write_output


def check(path: Path, overrides: Sequence[str], json_out: Path | None) -> int:
    """0 when every check passes, 2 otherwise. Raises ConfigError when the file is no configuration."""
    found = findings(configs.load(path, overrides, RunConfig), str(path))
    console = Console()
    for finding in found:
        mark = Text("ok     ", "green") if finding.ok else Text("refused", "red")
        console.print(Text.assemble(mark, "  ", finding.check), soft_wrap=True)
        if not finding.ok:
            console.print(f"         → {finding.problem}", soft_wrap=True, highlight=False, markup=False)
    refused = sum(not finding.ok for finding in found)
    console.print(f"{refused} of {len(found)} checks failed." if refused else f"{path} can be trained.", soft_wrap=True)
    if json_out is not None:
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
        write_output(json_out, text + b"\n", "--json")
    return 2 if refused else 0
