"""Where commands print: as wide as the terminal, and uncut where the output goes to a file or a program."""

import os
from typing import NoReturn

from rich.console import Console

WIDE = 4000
"""Columns of an output that is no terminal; longer than any line, so that nothing is cut or wrapped."""


class CommandConsole(Console):
    def on_broken_pipe(self) -> NoReturn:
        """The command decides how it ends, not the library."""
        raise BrokenPipeError


def open_console() -> Console:
    console = CommandConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = CommandConsole(width=WIDE)
    return console
