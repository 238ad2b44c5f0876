"""One answer under way: tokens come in, text that is certain goes out."""

from collections.abc import Iterator

from gyre.chat.stream_parse import ParsedTurn, StreamDelta, StreamingParse
from gyre.core.clock import Clock
from gyre.core.expert_routing import ExpertRouting, joined
from gyre.core.records import FinishReason
from gyre.proxy.dialects.base import Delta
from gyre.proxy.router.router import Piece
from gyre.trajectory.call import Sample


class Generation:
    """Collects the sample of one call exactly, and parses it as it grows.

    Text of tokens that arrive within `coalesce_s` of the last delta waits for the next token or the end.
    """

    def __init__(self, parser: StreamingParse, clock: Clock, coalesce_s: float) -> None:
        self.started_at = clock.now()
        self.cached_tokens = 0
        self._parser = parser
        self._clock = clock
        self._coalesce_s = coalesce_s
        self._sent_at: float | None = None
        self._unparsed: list[int] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._cells: list[int] = []
        self._routing: list[ExpertRouting] = []
        self._finish: FinishReason = "abort"

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def add(self, piece: Piece) -> Iterator[Delta]:
        if self._sent_at is None:
            # The engine confirmed the prompt: the answer may begin.
            self.cached_tokens = piece.cached_tokens
            yield Delta()
        self._ids += piece.output_ids
        self._logprobs += piece.logprobs
        self._versions += piece.versions
        self._unparsed += piece.output_ids
        if piece.routing is not None:
            self._routing.append(piece.routing)
        if piece.output_ids and piece.cell not in self._cells[-1:]:
            self._cells.append(piece.cell)
        if piece.finish is not None:
            self._finish = piece.finish
        now = self._clock.now()
        if self._sent_at is None or now - self._sent_at >= self._coalesce_s:
            self._sent_at = now
            yield from self._parse()

    def end(self) -> Iterator[Delta]:
        """The rest of the text; afterwards `turn` is complete."""
        yield from self._parse()
        yield from _deltas(self._parser.finish())

    @property
    def turn(self) -> ParsedTurn:
        return self._parser.turn

    def sample(self) -> Sample:
        """As far as it was produced; finish is "abort" when it was not completed."""
        return Sample(
            output_ids=self._ids,
            logprobs=self._logprobs,
            versions=self._versions,
            finish=self._finish,
            cells=self._cells,
            routing=joined(self._routing) if self._routing else None,
        )

    def _parse(self) -> Iterator[Delta]:
        ids, self._unparsed = self._unparsed, []
        yield from _deltas(self._parser.feed(ids))


def _deltas(parsed: StreamDelta) -> Iterator[Delta]:
    if parsed.reasoning:
        yield Delta(reasoning=parsed.reasoning)
    if parsed.text:
        yield Delta(text=parsed.text)
