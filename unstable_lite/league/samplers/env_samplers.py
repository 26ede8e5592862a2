"""Choose the env of the next game. Knows nothing of models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, overload

from unstable_lite.errors import ConfigError
from unstable_lite.rng import derive_seed, restore, state_of
from unstable_lite.types import EvalEnvSpec, GameKind, TrainEnvSpec


class BaseEnvSampler:
    """Override `_choose_train`, `_choose_eval` and `update`; extend the state where `update` keeps something.

    Train and eval have a random stream each: how many evaluations run does not change what is trained on.
    """

    def __init__(
        self,
        train_env_specs: Sequence[TrainEnvSpec],
        eval_env_specs: Sequence[EvalEnvSpec] = (),
        rng_seed: int = 489,
    ) -> None:
        self.train_env_specs = tuple(train_env_specs)
        self.eval_env_specs = tuple(eval_env_specs)
        self._train_rng = random.Random(derive_seed(rng_seed, "env", "train"))
        self._eval_rng = random.Random(derive_seed(rng_seed, "env", "eval"))

    @overload
    def sample(self, kind: Literal["train"]) -> TrainEnvSpec: ...
    @overload
    def sample(self, kind: Literal["eval"]) -> EvalEnvSpec: ...
    def sample(self, kind: GameKind) -> TrainEnvSpec | EvalEnvSpec:
        specs = self.train_env_specs if kind == "train" else self.eval_env_specs
        if not specs:
            raise ConfigError(f"a game of kind {kind!r} was asked for, and {kind}_envs is empty")
        return self._choose_train() if kind == "train" else self._choose_eval()

    def update(self, env_id: str, avg_actor_reward: float, avg_opponent_reward: float | None) -> None:
        """After each training game that was not void; no opponent reward where no other model sat."""

    def env_list(self) -> str:
        return ",".join(spec.env_id for spec in self.train_env_specs)

    def state_dict(self) -> dict[str, Any]:
        return {"train_rng": state_of(self._train_rng), "eval_rng": state_of(self._eval_rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._train_rng, state["train_rng"])
        restore(self._eval_rng, state["eval_rng"])

    def _choose_train(self) -> TrainEnvSpec:
        raise NotImplementedError

    def _choose_eval(self) -> EvalEnvSpec:
        raise NotImplementedError


class UniformRandomEnvSampler(BaseEnvSampler):
    """Each env is as likely as any other."""

    def _choose_train(self) -> TrainEnvSpec:
        return self._train_rng.choice(self.train_env_specs)

    def _choose_eval(self) -> EvalEnvSpec:
        return self._eval_rng.choice(self.eval_env_specs)
