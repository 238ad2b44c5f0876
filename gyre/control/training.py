"""The training loop: burst after burst, each of μ steps and a boundary. It decides when the run is over."""

from gyre.control.boundary import Boundary
from gyre.control.checkpoints import Checkpoints
from gyre.control.shared_state import SharedState
from gyre.control.steps import Steps


class TrainingLoop:
    def __init__(self, state: SharedState, steps: Steps, boundary: Boundary, checkpoints: Checkpoints) -> None:
        self._state = state
        self._steps = steps
        self._boundary = boundary
        self._checkpoints = checkpoints

    async def run(self, max_steps: int) -> None:
        """Returns when the policy version is `max_steps` and its checkpoint is complete."""
        state = self._state
        while state.version < max_steps:
            state.begin_burst(min(state.config.steps_per_burst, max_steps - state.version))
            for _ in range(state.burst.steps):
                await self._steps.run()
            await self._boundary.pass_burst(last=state.version >= max_steps)
        await self._checkpoints.settle()
