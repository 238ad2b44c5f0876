"""The training loop: burst after burst, each of μ steps and a boundary. It decides when the run is over.

The core's trainer may be lost at any moment. `Recovery` replaces it, and the new one goes back to its checkpoint
(`TrainingSet.back`) while executions go on; the loop sees `SharedState.line_broken`, leaves what it was doing, and
continues from there with `_continue`.
"""

from gyre.control.base import WorkerLost
from gyre.control.recovery import CORE, Recovery
from gyre.control.shared_state import LineBroken, SharedState
from gyre.control.training.boundary import Boundary
from gyre.control.training.checkpoints import Checkpoints
from gyre.control.training.steps import Steps


class TrainingLoop:
    def __init__(
        self, state: SharedState, recovery: Recovery, steps: Steps, boundary: Boundary, checkpoints: Checkpoints
    ) -> None:
        self._state = state
        self._recovery = recovery
        self._steps = steps
        self._boundary = boundary
        self._checkpoints = checkpoints

    async def run(self, max_steps: int) -> None:
        """Returns when the policy version is `max_steps` and its checkpoint is complete."""
        state = self._state
        while True:
            try:
                while state.version < max_steps:
                    await self._burst(max_steps)
                await self._checkpoints.settle()
                state.require_line()
                return
            except (LineBroken, WorkerLost):
                if not state.line_broken:
                    raise
            await self._continue(max_steps)

    async def _burst(self, max_steps: int) -> None:
        state = self._state
        state.require_line()
        state.begin_burst(min(state.config.steps_per_burst, max_steps - state.version))
        for _ in range(state.burst.steps):
            await self._steps.run()
        await self._boundary.pass_burst(last=state.version >= max_steps)

    async def _continue(self, max_steps: int) -> None:
        """Returns when the new core has gone back to its checkpoint and every engine serves that version."""
        state = self._state
        while state.line_broken:
            state.show("the core's trainer is lost: a new one goes back to its checkpoint")
            await state.signal.until(lambda: self._recovery.alive(CORE.part, CORE.cell))
            # Until it is lost again.
            state.line_broken = False
            try:
                await self._boundary.pass_core_failure(last=state.version >= max_steps)
            except (LineBroken, WorkerLost):
                if not state.line_broken:
                    raise
