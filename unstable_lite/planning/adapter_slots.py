"""Number of adapters that a run holds at once, in the engines' slots and in shared memory.

`num_frozen`: number of frozen players with an adapter, those added by hand included; default: those of the config.
"""

from __future__ import annotations

from unstable_lite.config import Config
from unstable_lite.league.opponents import frozen_adapters, strategies, uses_checkpoints
from unstable_lite.planning.algorithm_defaults import algorithm_of


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


def changing_slots(config: Config, num_frozen: int | None = None) -> int:
    """Return the number of slots that frozen players leave for the adapters of the run itself."""
    return config.engine.max_loras - _num_frozen(config, num_frozen)


def holds_games(config: Config) -> bool:
    """Return whether some games hold an adapter of the run in a slot until they end.

    With `adapter_policy` "turn" they are those against checkpoints and evaluation games beside training.
    """
    if config.league.adapter_policy == "game":
        return True
    is_evaluated = config.run.schedule == "async" and bool(config.eval_envs) and config.run.num_eval_workers > 0
    return is_evaluated or _plays_checkpoints(config)


def adapters_in_memory(config: Config, num_frozen: int | None = None) -> int:
    """Return the shared memory that a run may need, as a multiple of one adapter's size.

    It holds the loaded adapters except frozen players, which are read from the run directory, the next one, and one
    that is loaded again. The learner adds three versions (this one, the next one, and the one that is being saved),
    each with two moments, and the same again for a critic.
    """
    return changing_slots(config, num_frozen) + 2 + 3 * 3 * (2 if algorithm_of(config).has_critic else 1)


def _plays_checkpoints(config: Config) -> bool:
    """Return whether some training games are against checkpoints."""
    has_opponents = any(spec.num_actors < spec.num_players for spec in config.train_envs)
    return has_opponents and uses_checkpoints(config.league)


def _slots_besides_active(config: Config, num_frozen: int | None, has_pool: bool) -> int:
    """Return the number of slots beside those of the active checkpoints.

    One is for the next adapter while the last one is still played, one for an opponent that is replaced by another, one
    for the checkpoint that is evaluated while training continues, and one for each frozen player with an adapter, which
    stays for the whole run.
    """
    return 1 + has_pool + bool(config.run.eval_every) + _num_frozen(config, num_frozen)


def _num_frozen(config: Config, num_frozen: int | None) -> int:
    return len(frozen_adapters(config)) if num_frozen is None else num_frozen
