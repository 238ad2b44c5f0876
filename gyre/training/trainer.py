"""One training rank: the life cycle of `gyre.training.base.Trainer`, synchronous, in the training thread.

asleep ─wake─▶ awake ─join─▶ joined ─micro_step*─▶ joined ─reduce─▶ reduced ─optimizer_step─▶ awake   (core)
                                                          └──────reduce──────▶ awake                  (satellite)
"""

from enum import StrEnum

import torch

from gyre.core.errors import InvariantViolation, NotReady
from gyre.training import checkpoint, micro
from gyre.training.base import MicroStepResult, StepStats
from gyre.training.config import TrainerConfig
from gyre.training.groups import PrefixGroups, connect_store
from gyre.training.megatron import parallel
from gyre.training.megatron.adam import Adam
from gyre.training.megatron.replica import Replica
from gyre.trajectory.microstep import MicroStep, Row
from gyre.transport.base import WeightRef, WeightTransport

STORE_TIMEOUT_S = 60.0
"""How long a rank waits for the store and for the other ranks of its cell at start."""


class Phase(StrEnum):
    ASLEEP = "asleep"
    AWAKE = "awake"
    JOINED = "joined"
    REDUCED = "reduced"


class MegatronTrainer:
    """Starts asleep; the core starts with the weights of `model_dir` as version 0."""

    def __init__(self, config: TrainerConfig, transport: WeightTransport) -> None:
        torch.manual_seed(config.seed)
        self._config = config
        self._transport = transport
        self._core = config.cell == 0
        store = connect_store(config.store, STORE_TIMEOUT_S)
        parallel.initialize(config.parallel, config.rank, f"cell/{config.cell}/{config.incarnation}", store)
        self._groups = PrefixGroups(store, config.cell, config.rank, config.host, config.group_timeout_s)
        self._replica = Replica(config.model_dir, config.temperature, config.share_prefixes)
        self._adam = Adam(self._replica, config.optimizer) if self._core else None
        self.version = 0 if self._core else -1
        """Policy version of the parameters; −1 before a satellite's first join."""
        self.phase = Phase.AWAKE
        if self._core:
            self._replica.scatter(checkpoint.read_initial(config.model_dir))
        self.sleep()

    def wake(self) -> None:
        if self.phase is Phase.ASLEEP:
            self._replica.wake()
            self.phase = Phase.AWAKE

    def sleep(self) -> None:
        if self.phase is Phase.ASLEEP:
            return
        self._replica.sleep(keep_parameters=self._core, optimizer_state=self._adam.tensors if self._adam else [])
        if not self._core:
            self.version = -1
        self.phase = Phase.ASLEEP

    def join(self, version: int, weights: WeightRef | None) -> None:
        """Raises NotReady when asleep, InvariantViolation when `version` is not what core or snapshot hold, and
        WeightsUnavailable when the snapshot is gone; after an error the rank has not joined."""
        self._require("join", Phase.AWAKE, Phase.JOINED, Phase.REDUCED)
        if self._core:
            if weights is not None or version != self.version:
                raise InvariantViolation(f"the core is at version {self.version} and cannot join version {version}")
        else:
            self._pull(version, weights)
        self._replica.zero_gradients()
        self.phase = Phase.JOINED

    def micro_step(self, micro_step: MicroStep) -> MicroStepResult:
        self._require("micro_step", Phase.JOINED)
        micro.check(micro_step)
        before = self._replica.snapshot_gradients()
        try:
            return micro.run(
                micro_step, self.version, self._replica.logprobs, torch.Tensor.backward, self._config.objective
            )
        except BaseException:
            self._replica.restore_gradients(before)
            raise

    def reduce(self, generation: int, members: int) -> None:
        """After GroupBroken the local gradient is as before and `reduce` may be called again."""
        self._require("reduce", Phase.JOINED)
        before = self._replica.snapshot_gradients()
        self._replica.finish_gradients()
        try:
            sums = self._groups.sum_to_core(generation, members, self._replica.gradients) if members > 1 else []
        except BaseException:
            self._replica.restore_gradients(before)
            raise
        if sums:
            self._replica.restore_gradients(sums)
        self.phase = Phase.REDUCED if self._core else Phase.AWAKE

    def optimizer_step(self) -> StepStats:
        """Raises InvariantViolation when the gradient is not finite; the parameters are then unchanged."""
        adam = self._core_only("optimizer_step")
        self._require("optimizer_step", Phase.REDUCED)
        if not all(bool(gradient.isfinite().all()) for gradient in self._replica.gradients):
            raise InvariantViolation(f"the gradient of version {self.version} is not finite: no step was taken")
        norm = adam.step()
        self.version += 1
        self.phase = Phase.AWAKE
        return StepStats(version=self.version, grad_norm=norm)

    def publish(self) -> WeightRef:
        self._core_only("publish")
        self._require("publish", Phase.AWAKE, Phase.JOINED, Phase.REDUCED)
        return self._transport.publish(self.version, self._replica.whole())

    def score(self, ids_T: list[int]) -> list[float]:
        self._require("score", Phase.AWAKE, Phase.JOINED, Phase.REDUCED)
        if self.version < 0:
            raise NotReady(f"cell {self._config.cell} cannot score: it has no weights, join first")
        targets = list(range(1, len(ids_T)))
        row = Row(ids_T=ids_T, targets=targets, logprobs=[0.0] * len(targets), versions=[self.version] * len(targets))
        with torch.no_grad():
            (logprobs,) = self._replica.logprobs([row])
        return list(logprobs.tolist())

    def save(self, directory: str) -> None:
        adam = self._core_only("save")
        self._require("save", Phase.AWAKE, Phase.JOINED, Phase.REDUCED)
        state = checkpoint.Checkpoint(
            version=self.version,
            steps=adam.steps,
            parameters=self._replica.whole(),
            moments=adam.whole_moments(),
            rng=torch.get_rng_state(),
        )
        if self._config.rank == 0:
            checkpoint.write(directory, self._config.model_dir, state)

    def load(self, directory: str) -> int:
        adam = self._core_only("load")
        self._require("load", Phase.AWAKE)
        state = checkpoint.read(directory)
        self._replica.scatter(state.parameters)
        adam.load(state.steps, state.moments)
        torch.set_rng_state(state.rng)
        self.version = state.version
        return state.version

    def _pull(self, version: int, weights: WeightRef | None) -> None:
        if weights is None or weights.version != version:
            given = "no weights" if weights is None else f"weights of version {weights.version}"
            raise InvariantViolation(f"cell {self._config.cell} was asked to join version {version} with {given}")
        self.version = -1
        self._replica.scatter(self._transport.pull(weights))
        self.version = version

    def _require(self, what: str, *phases: Phase) -> None:
        if self.phase not in phases:
            raise NotReady(
                f"cell {self._config.cell} is {self.phase} and cannot {what}: it must be {' or '.join(phases)}"
            )

    def _core_only(self, what: str) -> Adam:
        if self._adam is None:
            raise NotReady(f"cell {self._config.cell} is a satellite: only the core (cell 0) can {what}")
        return self._adam
