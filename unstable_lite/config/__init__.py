"""Config of a run: frozen models of its sections.

Defaults are the reference's (`runtime.py` `build()`); a comment gives the reason for each exception. Sections group the
keyword names of `build()` without renaming them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from unstable_lite.config.games import EvalEnvSpec, LeagueConfig, OpponentsConfig, TemplateConfig, TrainEnvSpec
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
