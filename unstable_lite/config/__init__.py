"""Config of a run: frozen models of its sections.

Defaults are the reference's (`runtime.py` `build()`); a comment gives the reason for each exception. Sections group the
keyword names of `build()` without renaming them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import Field, model_validator

from unstable_lite.config.games import LeagueConfig, OpponentsConfig, TemplateConfig
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
from unstable_lite.types import INHERITED, EvalEnvSpec, TrainEnvSpec


class Config(Section):
    model_name: str = "builtin:tiny"
    """`builtin:tiny`, a model hub's name, a local directory with weights in safetensors, or a GGUF file (`*.gguf`),
    which is converted once."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model, in engines and learner. Read it first: it has all your
    permissions."""
    algorithm: str = "reinforce"
    """`reinforce`, `a2c`, `ppo`, `grpo`, `rloo`, or a custom class as `module:Class`."""
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

    @model_validator(mode="before")
    @classmethod
    def _inherit_from_training(cls, given: Any) -> Any:
        """Copy the keys that an eval env leaves out from the training env of the same id; see `INHERITED`.

        An `EvalEnvSpec` counts as leaving out every key that is at its default.
        """
        if not isinstance(given, dict):
            return given
        train, evaluated = given.get("train_envs"), given.get("eval_envs")
        if not isinstance(train, list | tuple) or not isinstance(evaluated, list | tuple):
            return given
        trained = {
            str(env.get("env_id")): {key: env[key] for key in INHERITED if key in env} for env in map(_given, train)
        }
        return {
            **given,
            "eval_envs": [
                trained[env_id] | own if (env_id := str((own := _given(env)).get("env_id"))) in trained else env
                for env in evaluated
            ],
        }

    @property
    def buffer_size(self) -> int:
        return self.buffer.buffer_size or 2 * self.learner.batch_size

    @property
    def group_baseline(self) -> Literal["grpo", "rloo"] | None:
        of_algorithm: dict[str, Literal["grpo", "rloo"]] = {"grpo": "grpo", "rloo": "rloo"}
        return self.rewards.group_baseline or of_algorithm.get(self.algorithm)


def _given(env: Any) -> dict[str, Any]:
    """Return the keys that an env's entry sets; for a spec, those not at their default."""
    if isinstance(env, TrainEnvSpec | EvalEnvSpec):
        return {f.name: value for f in fields(env) if (value := getattr(env, f.name)) != f.default}
    return env if isinstance(env, dict) else {}
