"""Settings that a config leaves open, decided by its algorithm and league: batches, reward transforms, adapter slots.

Knows the algorithms' entries in `LEARNERS`, not their code. `num_frozen`: number of frozen players with an adapter,
those added by hand included; default: those of the config.
"""

from __future__ import annotations

from typing import Any

from unstable_lite.adapters.frozen import with_members
from unstable_lite.config import Config
from unstable_lite.config.training import Transformation
from unstable_lite.league.opponents import frozen_adapters, met_opponents, strategies, uses_checkpoints
from unstable_lite.learner import LEARNERS, Algorithm


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
    """Return the config with each setting that it leaves open set to the default of its algorithm and league."""
    kind = algorithm_of(config).batches if config.buffer.kind == "auto" else config.buffer.kind
    # A critic or a group is already a baseline; a role average or the batch mean would be a second one.
    has_baseline = config.group_baseline is not None or kind == "episodes"
    open_ones = {
        "final_reward_transformation": () if has_baseline else ("RoleAdvantageByEnvFormatter",),
        "step_reward_transformation": _STEP_PENALTIES if kind == "episodes" else _STEP_REWARDS,
        "sampling_reward_transformation": () if has_baseline else _NORMALIZED,
    }
    rewards = {name: value for name, value in open_ones.items() if getattr(config.rewards, name) is None}
    config = _with_members(config).changed(buffer={"kind": kind}, rewards=rewards)
    engine, needed = config.engine, adapter_slots_needed(config)
    if "max_loras" in engine.model_fields_set or needed <= engine.max_loras:
        return config
    # Games in flight hold slots too, as many as the updates that happen while they last.
    return config.changed(engine={"max_loras": needed + config.buffer.max_staleness // 2})


def policy_configs(config: Config) -> dict[str, Config]:
    return {name: resolve_defaults(config.of_policy(name)) for name in config.policies} or {"": config}


def _with_members(config: Config) -> Config:
    """Return the config with the checkpoints of each average that it may meet, which a resumed run then has, too."""
    met = met_opponents(config)

    def named(name: str) -> str:
        return with_members(name) if name in met else name

    def with_named(section: Any) -> Any:
        names = section.fixed_opponents
        return section.changed(fixed_opponents=names and tuple(map(named, names)))

    evaluated = tuple(env.changed(fixed_opponent=named(env.fixed_opponent)) for env in config.eval_envs)
    trained = tuple(map(with_named, config.train_envs))
    return config.changed(league=with_named(config.league), train_envs=trained, eval_envs=evaluated)


def active_checkpoints(config: Config, num_frozen: int | None = None) -> int:
    """Return the number of checkpoints that can be played at once, the current one included."""
    league = config.league
    if league.max_active_checkpoints is not None:
        return league.max_active_checkpoints
    if not _plays_checkpoints(config):
        return 1
    least, most = league.opponent_lag
    wanted = 1 + max(1, most - max(least, 1) + 1)
    if "lagged" in strategies(league):
        return wanted
    return max(2, min(wanted, config.engine.max_loras - _slots_besides_active(config, num_frozen, has_pool=True)))


def adapter_slots_needed(config: Config, num_frozen: int | None = None) -> int:
    """Return the number of adapter slots for the active checkpoints and for adapters in transition."""
    active = active_checkpoints(config, num_frozen)
    return active + _slots_besides_active(config, num_frozen, has_pool=active > 1)


def _slots_besides_active(config: Config, num_frozen: int | None, has_pool: bool) -> int:
    """Return the number of slots beside those of the active checkpoints.

    One is for the next adapter while the last one is still played, one for an opponent that is replaced by another, one
    for the checkpoint that is evaluated while training continues, and one for each frozen player with an adapter, which
    stays for the whole run.
    """
    frozen = len(frozen_adapters(config)) if num_frozen is None else num_frozen
    return 1 + has_pool + bool(config.run.eval_every) + frozen


def changing_slots(config: Config, num_frozen: int | None = None) -> int:
    """Return the number of slots that frozen players leave for the adapters of the run itself."""
    return config.engine.max_loras - (len(frozen_adapters(config)) if num_frozen is None else num_frozen)


def holds_games(config: Config) -> bool:
    """Return whether some games hold an adapter of the run in a slot until they end.

    With `adapter_policy` "turn" they are those against checkpoints and evaluation games beside training.
    """
    is_evaluated = config.run.schedule == "async" and bool(config.eval_envs) and config.run.num_eval_workers > 0
    return config.league.adapter_policy == "game" or is_evaluated or _plays_checkpoints(config)


def adapters_in_memory(config: Config, num_frozen: int | None = None) -> int:
    """Return the shared memory that a run may need, as a multiple of one adapter's size.

    It holds the loaded adapters except frozen players, which are read from the run directory, the next one, and one
    that is loaded again. The learner adds three versions (this one, the next one, and the one that is being saved),
    each with two moments, and the same again for a critic.
    """
    return changing_slots(config, num_frozen) + 2 + 3 * 3 * (1 + algorithm_of(config).has_critic)


def _plays_checkpoints(config: Config) -> bool:
    """Return whether some training games are against checkpoints."""
    has_opponents = any(spec.num_actors < spec.num_players for spec in config.train_envs)
    return has_opponents and uses_checkpoints(config.league)
