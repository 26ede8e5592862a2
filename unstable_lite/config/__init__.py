"""Config of a run: frozen models of its sections.

Defaults are the reference's (`runtime.py` `build()`); a comment gives the reason for each exception. Sections group the
keyword names of `build()` without renaming them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from unstable_lite.config.games import (
    EvalEnvSpec,
    LeagueConfig,
    OpponentsConfig,
    PolicyConfig,
    TemplateConfig,
    TrainEnvSpec,
)
from unstable_lite.config.section import Section
from unstable_lite.config.tracking import AlarmsConfig, TrackerConfig
from unstable_lite.config.training import (
    BufferConfig,
    EngineConfig,
    LearnerConfig,
    LoraConfig,
    RewardConfig,
    RunConfig,
    SftConfig,
)
from unstable_lite.plugins import name_of
from unstable_lite.rng import derive_seed


class Config(Section):
    model_name: str = "builtin:tiny"
    """`builtin:tiny`, `builtin:tiny-games` (for games of OpenSpiel), a model hub's name, a local directory with weights
    in safetensors, or a GGUF file (`*.gguf`), which is converted once."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model, in engines and learner. Read it first: it has all your
    permissions."""
    algorithm: str = "reinforce"
    """`reinforce`, `a2c`, `ppo`, `grpo`, `rloo`, or a custom class as `module:Class`; a script may give the class."""
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoraConfig = LoraConfig()
    buffer: BufferConfig = BufferConfig()
    rewards: RewardConfig = RewardConfig()
    league: LeagueConfig = LeagueConfig()
    opponents: OpponentsConfig = OpponentsConfig()
    tracker: TrackerConfig = TrackerConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    templates: dict[str, TemplateConfig] = {}  # noqa: RUF012 (pydantic copies it)
    sft: SftConfig = SftConfig()
    policies: dict[Annotated[str, Field(pattern=r"^[A-Za-z]\w{0,31}$")], PolicyConfig] = {}  # noqa: RUF012
    train_envs: tuple[TrainEnvSpec, ...] = Field(min_length=1)
    eval_envs: tuple[EvalEnvSpec, ...] = ()

    @field_validator("algorithm", mode="before")
    @classmethod
    def _name_class(cls, algorithm: Any) -> Any:
        if not isinstance(algorithm, type):
            return algorithm
        name = name_of("algorithm", algorithm)
        is_own = name.startswith("unstable_lite.learner.algorithms.")
        return algorithm.__name__.removesuffix("Learner").lower() if is_own else name

    @field_validator("eval_envs")
    @classmethod
    def _inherit_from_training(cls, envs: tuple[EvalEnvSpec, ...], info: ValidationInfo) -> tuple[EvalEnvSpec, ...]:
        trained = {env.env_id: env for env in info.data.get("train_envs", ())}
        return tuple(env.inheriting(trained.get(env.env_id)) for env in envs)

    @property
    def buffer_size(self) -> int:
        return self.buffer.buffer_size or 2 * self.learner.batch_size

    @property
    def eval_cells(self) -> list[tuple[str, str]]:
        """Env and opponent of each eval env, in the order of results."""
        return [(env.env_id, env.opponent) for env in self.eval_envs]

    @property
    def group_baseline(self) -> Literal["grpo", "mean", "rloo", "duplicate"] | None:
        of_algorithm: dict[str, Literal["grpo", "rloo"]] = {"grpo": "grpo", "rloo": "rloo"}
        return self.rewards.group_baseline or of_algorithm.get(self.algorithm)

    @property
    def plays_duplicates(self) -> bool:
        """Whether the games of a group are one deal with the policy at each seat in turn."""
        return self.group_baseline == "duplicate"

    @property
    def shares(self) -> dict[str, float]:
        """Each policy's share of the updates, by its name; the only policy of a run has the name ""."""
        given = {name: policy.share for name, policy in self.policies.items()}
        left, num_open = 1 - sum(filter(None, given.values())), [*given.values()].count(None)
        return {name: share or left / num_open for name, share in given.items()} or {"": 1.0}

    def of_policy(self, name: str) -> Config:
        """Return the config of one policy, as if a run had no other; its seed and a lineage's updates are its own.

        Its training envs are those with a seat for it or without `seats`; its eval envs are those against others.
        Raises KeyError if there is no such policy.
        """
        if not self.policies:
            return self
        policy, opponents = self.policies[name], self.league.opponent_sampling_strategy
        played = (env for env in self.train_envs if not env.seats or name in env.seats)
        updates = max(1, math.ceil(self.shares[name] * self.run.learning_steps))
        of_lineage = policy.restart and policy.restart.at_updates
        return self.changed(
            policies={},
            algorithm=policy.algorithm or self.algorithm,
            learner=policy.learner,
            league={"opponent_sampling_strategy": opponents if policy.opponents is None else policy.opponents},
            run={
                "seed": derive_seed(self.run.seed, "policy", name),
                "learning_steps": min(updates, of_lineage or updates),
            },
            train_envs=tuple(env.changed(num_actors=env.seats.count(name)) if env.seats else env for env in played),
            eval_envs=tuple(env for env in self.eval_envs if env.fixed_opponent != f"policy:{name}"),
        )
