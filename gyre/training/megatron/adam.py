"""The one optimizer of a run: Megatron's Adam on the core, with its moments in Hugging Face layout for checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from gyre.training.config import OptimizerConfig
from gyre.training.megatron.replica import Replica

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam:
    """Acts on a replica's parameters and gradient. All ranks of the core have one."""

    def __init__(self, replica: Replica, config: OptimizerConfig) -> None:
        self._replica = replica
        self._optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.epsilon,
                weight_decay=config.weight_decay,
                clip_grad=config.clip_norm,
                params_dtype=torch.float32,
            ),
            [replica.ddp],
        )
        self._parts: list[Any] = list(self._optimizer.chained_optimizers)
        # Megatron leaves it to its learning-rate scheduler, which no run has, to spare norms and biases from decay.
        for group in self._groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]

    def step(self) -> float:
        """Clips, updates the parameters, and returns the global gradient norm before clipping."""
        _, norm, _ = self._optimizer.step()
        for parameter in self._replica.parameters.values():
            parameter.grad = None
        return float(norm)

    @property
    def steps(self) -> int:
        """Updates taken so far."""
        return next((int(state["step"]) for state in self._state.values()), 0)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every moment that has storage; empty before the first step."""
        return [state[moment] for state in self._state.values() for moment in MOMENTS]

    def whole_moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Moment → Hugging Face name → whole tensor; empty before the first step. Collective over the cell."""
        if not self._state:
            return {}
        local = {
            moment: {name: self._state[p][moment] for name, p in self._replica.parameters.items()} for moment in MOMENTS
        }
        return {moment: self._replica.whole(tensors) for moment, tensors in local.items()}

    def load(self, steps: int, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """The inverse of `whole_moments` at `steps` updates. Raises WeightsUnavailable."""
        for part in self._parts:
            part.optimizer.state.clear()
        if not steps:
            return
        for part in self._parts:
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                state = {moment: torch.zeros_like(parameter, dtype=torch.float32) for moment in MOMENTS}
                part.optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **state}
        for moment in MOMENTS:
            into = {name: self._state[p][moment] for name, p in self._replica.parameters.items()}
            self._replica.scatter(moments.get(moment, {}), into)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.optimizer.param_groups]

    @property
    def _state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Dense parameters and experts have an optimizer each."""
        return {parameter: state for part in self._parts for parameter, state in part.optimizer.state.items()}
