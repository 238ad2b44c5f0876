"""The training loop: burst after burst, each of μ steps and a boundary. It decides when the run is over."""

from gyre.control.board import Board
from gyre.control.boundary import Boundary
from gyre.control.checkpoints import Checkpoints
from gyre.control.steps import Steps


class TrainingLoop:
    def __init__(self, board: Board, steps: Steps, boundary: Boundary, checkpoints: Checkpoints) -> None:
        self._board = board
        self._steps = steps
        self._boundary = boundary
        self._checkpoints = checkpoints

    async def run(self, max_steps: int) -> None:
        """Returns when the policy version is `max_steps` and its checkpoint is complete."""
        board = self._board
        while board.version < max_steps:
            board.begin_burst(min(board.config.mu, max_steps - board.version))
            for _ in range(board.burst.steps):
                await self._steps.run()
            await self._boundary.pass_burst(last=board.version >= max_steps)
        await self._checkpoints.settle()
