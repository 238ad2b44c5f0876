"""DeepSeek V4's calls, read in time linear in the turn.

The `renderers` library also says which tokens a call spans, and for that decodes all tokens before each mark again, one
more at a time: a call of 13,000 tokens holds its caller for 19 s. Nobody asks for these spans here. So the library is
given whole runs of text as if each were one token; which runs are calls stays its decision.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from renderers import ParsedResponse
from renderers.parsing import parse_deepseek_v4


class _Runs:
    """A tokenizer whose tokens are runs of text, with ids below zero, and the given tokens."""

    def __init__(self, ids: Sequence[int], whole: set[int], decode: Callable[[list[int]], str]) -> None:
        self.ids: list[int] = []
        self._texts = {token: decode([token]) for token in whole}
        for is_whole, run in groupby(ids, key=whole.__contains__):
            if is_whole:
                self.ids += run
            else:
                self.ids.append(-1 - len(self.ids))
                self._texts[self.ids[-1]] = decode(list(run))

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self._texts[i] for i in ids)


def parse_dsml(
    ids: Sequence[int], decode: Callable[[list[int]], str], *, think_open: int, think_close: int, thinking: bool
) -> ParsedResponse:
    """`ids` hold no stop token. `thinking`: the prompt has opened reasoning."""
    runs = _Runs(ids, {think_open, think_close}, decode)
    return parse_deepseek_v4(
        runs, runs.ids, stop_ids=set(), thinking_enabled=thinking, think_end_id=think_close, think_start_id=think_open
    )
