"""Streaming 1F1B: a pipeline schedule with an open-ended number of packs of any length (docs/training.md).

Every stage executes the same sequence of `train`, `score` and `drain`. A stage keeps up to w = stages after it packs in
flight; in steady state each `train` is one forward and the backward of the oldest pack. After each call every message
that was sent has also been asked for by its receiver, so the stages may pause between any two calls for as long as they
like, with the pipeline full: nothing waits inside a process group. There is one warm-up and one drain a batch.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

P = TypeVar("P")
LossFn = Callable[[torch.Tensor], torch.Tensor]
"""On the last stage: output of the forward pass → scalar loss."""


class Stage:
    """The neighbours of a pipeline stage and what travels between them: activations [T, 1, hidden], first to last."""

    def __init__(self, group: dist.ProcessGroup, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._hidden = hidden
        self._dtype = dtype
        self._device = device
        self.index = dist.get_rank(group)
        self.after = dist.get_world_size(group) - 1 - self.index
        """Stages after this one."""

    def send(self, tensor: torch.Tensor, step: int) -> "dist.Work":
        """Starts sending to the next (+1) or previous (−1) stage; the tensor must live until the work is waited for."""
        work = dist.isend(tensor, self._global(step), self._group)
        assert work is not None
        return work

    def receive(self, tokens: int, step: int) -> tuple["dist.Work", torch.Tensor]:
        buffer = torch.empty(tokens, 1, self._hidden, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, self._global(step), self._group)
        assert work is not None
        return work, buffer

    def _global(self, step: int) -> int:
        return dist.get_global_rank(self._group, self.index + step)


@dataclass
class _InFlight:
    """A pack whose forward is done and whose backward is not."""

    source: torch.Tensor | None
    """Received activation, None on the first stage."""
    output: torch.Tensor
    tokens: int


@dataclass
class Pipeline(Generic[P]):
    """The state of one stage. `forward(pack, activation)` runs the stage's layers."""

    stage: Stage
    forward: Callable[[P, torch.Tensor | None], torch.Tensor]
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _gradient: tuple["dist.Work", torch.Tensor] | None = None
    """The receive, already posted, of the gradient of the oldest pack in flight."""
    _sends: list[tuple["dist.Work", torch.Tensor]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self._in_flight

    def score(self, pack: P, tokens: int) -> torch.Tensor | None:
        """Forward without gradient; the output on the last stage, None elsewhere."""
        with torch.no_grad():
            _, output = self._forward(pack, tokens)
        if self.stage.after == 0:
            return output
        self._send(output, +1)
        return None

    def train(self, pack: P, tokens: int, loss: LossFn) -> None:
        """Forward of this pack and, once the pipeline is warm, backward of the oldest one."""
        source, output = self._forward(pack, tokens)
        if self.stage.after == 0:
            self._backward(_InFlight(source, loss(output), tokens), None)
            return
        self._send(output, +1)
        self._in_flight.append(_InFlight(source, output, tokens))
        if len(self._in_flight) > self.stage.after:
            self._backward_oldest()
        if len(self._in_flight) == self.stage.after:
            self._expect_gradient()

    def drain(self) -> None:
        """Backward of everything in flight. All stages call it; the pipeline can be used again afterwards."""
        while self._in_flight:
            if self._gradient is None:
                self._expect_gradient()
            self._backward_oldest()
        self._settle()

    def _forward(self, pack: P, tokens: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        self._settle()
        source = None
        if self.stage.index > 0:
            work, source = self.stage.receive(tokens, -1)
            work.wait()
            source.requires_grad_(torch.is_grad_enabled())
        return source, self.forward(pack, source)

    def _expect_gradient(self) -> None:
        self._gradient = self.stage.receive(self._in_flight[0].tokens, +1)

    def _backward_oldest(self) -> None:
        assert self._gradient is not None
        work, gradient = self._gradient
        work.wait()
        self._gradient = None
        self._backward(self._in_flight.popleft(), gradient)

    def _backward(self, pack: _InFlight, gradient: torch.Tensor | None) -> None:
        torch.autograd.backward(pack.output, gradient)
        if pack.source is not None:
            assert pack.source.grad is not None
            self._send(pack.source.grad, -1)

    def _send(self, tensor: torch.Tensor, step: int) -> None:
        tensor = tensor.detach().contiguous()
        self._sends.append((self.stage.send(tensor, step), tensor))

    def _settle(self) -> None:
        """Waits for earlier sends, which their receivers have posted by now, and lets their buffers go."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
