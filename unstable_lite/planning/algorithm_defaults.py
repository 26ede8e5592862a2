"""Settings that the algorithm decides if the config leaves them open (kind of batches, reward transforms) or forbids.

Knows the algorithms' entries in `LEARNERS`, not their code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from unstable_lite.adapters.peft_files import is_file
from unstable_lite.config import Config
from unstable_lite.config.training import RewardConfig, Transformation
from unstable_lite.learner import CRITIC_HEAD, LEARNERS, Algorithm


def _transformation(name: str, **keywords: float | bool) -> Transformation:
    return Transformation.model_validate({"name": name, **keywords})


_STEP_REWARDS = (
    _transformation("RewardForFormat", reward=1.5),
    _transformation("PenaltyForInvalidMove", reward=1.0, penalty=-1.0),
)
"""Step rewards of the reference, which hides the +1.0 for each valid step that is written out here."""
_STEP_PENALTIES = (
    _transformation("RewardForFormat", penalty=-1.5),
    _transformation("PenaltyForInvalidMove", penalty=-2.0),
)
"""Same differences as penalties: returns add up over a player's turns, so a bonus per turn would reward length."""
_NORMALIZED = (_transformation("NormalizeRewardsByEnv", z_score=True),)


def algorithm_of(config: Config) -> Algorithm:
    """Return the named algorithm, or the assumptions about a `module:Class`."""
    return LEARNERS.get(config.algorithm, Algorithm(target=config.algorithm))


def resolve_defaults(config: Config) -> Config:
    """Return the config with each setting that it leaves open set to the algorithm's default."""
    kind = algorithm_of(config).batches if config.buffer.kind == "auto" else config.buffer.kind
    has_group = config.group_baseline is not None
    # A critic or a group is already a baseline; a role average or the batch mean would be a second one.
    has_baseline = has_group or kind == "episodes"
    open_ones = {
        "final_reward_transformation": () if has_baseline else ("RoleAdvantageByEnvFormatter",),
        "step_reward_transformation": _STEP_PENALTIES if kind == "episodes" else _STEP_REWARDS,
        "sampling_reward_transformation": () if has_baseline else _NORMALIZED,
    }
    rewards = {name: value for name, value in open_ones.items() if getattr(config.rewards, name) is None}
    return config.model_copy(
        update={
            "buffer": config.buffer.model_copy(update={"kind": kind}),
            "rewards": config.rewards.model_copy(update=rewards),
        }
    )


def describe_rewards(rewards: RewardConfig) -> str:
    """Return a readable list of the transforms that a reward passes through."""
    lists = {
        "final": rewards.final_reward_transformation,
        "step": rewards.step_reward_transformation,
        "sampling": rewards.sampling_reward_transformation,
    }
    return "; ".join(f"{kind}: {' + '.join(transform_names(entries)) or 'none'}" for kind, entries in lists.items())


def transform_names(entries: Iterable[Transformation | str] | None) -> list[str]:
    return [entry if isinstance(entry, str) else entry.name for entry in entries or ()]


def algorithm_problems(config: Config) -> Iterable[str]:
    """Yield each reason why the algorithm cannot run with these settings."""
    algorithm, learner = algorithm_of(config), config.learner
    is_ours = config.algorithm in LEARNERS
    if is_ours and config.buffer.kind not in ("auto", algorithm.batches):
        yield (
            f"buffer.kind = {config.buffer.kind!r}: {config.algorithm} learns from {algorithm.batches}; "
            'leave it at "auto"'
        )
    if is_ours and learner.options:
        yield f"learner.options: {config.algorithm} has no options; only a custom algorithm (module:Class) has them"
    if critic := config.lora.initial_critic_path:
        if is_ours and not algorithm.has_critic:
            yield f"lora.initial_critic_path: {config.algorithm} has no critic"
        if not is_file(critic / CRITIC_HEAD):
            yield f"lora.initial_critic_path: no {CRITIC_HEAD} in {critic}"
    if algorithm.is_clipped and learner.ppo_minibatches > learner.batch_size:
        yield (
            f"learner.ppo_minibatches = {learner.ppo_minibatches} is more than learner.batch_size = "
            f"{learner.batch_size}: some minibatches would be empty"
        )
    yield from _adapter_policy_problems(config)
    if learner.optimizer == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield "learner.optimizer = 'adamw8bit': bitsandbytes is not installed; pip install 'unstable-lite[adamw8bit]'"


def _adapter_policy_problems(config: Config) -> Iterable[str]:
    """Yield each reason why the turns of one game cannot have different adapters."""
    key, algorithm = "league.adapter_policy = 'turn'", algorithm_of(config)
    if config.league.adapter_policy == "game":
        return
    if config.run.group_size > 1:
        yield (
            f"{key}: games of a group are compared as games of one policy, but with run.group_size = "
            f"{config.run.group_size} later games and turns would have newer ones; set it to 'game'"
        )
    if algorithm.has_critic or "episodes" in (config.buffer.kind, algorithm.batches):
        yield (
            f"{key}: {config.algorithm} learns from episodes, whose later turns are taken as the play of the same "
            "policy; set it to 'game'"
        )


def dropout_problems(config: Config) -> Iterable[str]:
    """Yield the reason why a built-in algorithm cannot use LoRA dropout; `sft` and custom algorithms can."""
    if config.lora.lora_dropout and config.algorithm in LEARNERS:
        yield (
            f"lora.lora_dropout = {config.lora.lora_dropout}: {config.algorithm} compares each token's probability "
            "with the one it was sampled with, and dropout changes the policy in every pass; set it to 0"
        )
