"""Groups of games that are compared with each other, and groups that start within an earlier game: their problems."""

from __future__ import annotations

from collections.abc import Iterator

from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_questions
from unstable_lite.config.games import BranchingConfig
from unstable_lite.games.env_catalogue import probe
from unstable_lite.games.trial_games import repeat_problem
from unstable_lite.league.opponents import strategies
from unstable_lite.planning.algorithm_defaults import transform_names
from unstable_lite.reward_transformations import BASELINES


def group_problems(config: Config) -> Iterator[str]:
    """Yield each reason why games cannot be played in groups of this size, or compared in this way."""
    group_size, baseline = config.run.group_size, config.group_baseline
    if baseline is not None and group_size < 2:
        key = f"algorithm = {config.algorithm!r}" if config.rewards.group_baseline is None else "rewards.group_baseline"
        yield f"{key} compares the games of a group, so run.group_size = {group_size} must be at least 2"
    if group_size > 1 and baseline is None:
        yield (
            f"run.group_size = {group_size}: no baseline compares the games of a group; "
            "set rewards.group_baseline to 'grpo', 'mean', 'rloo' or 'duplicate'"
        )
    if config.plays_duplicates:
        yield from _duplicate_problems(config)
    fitting = {"grpo": ("grpo", "mean"), "rloo": ("rloo",)}
    if baseline not in fitting.get(config.algorithm, (baseline,)):
        yield f"rewards.group_baseline = {baseline!r} contradicts algorithm = {config.algorithm!r}; leave it out"
    if group_size > config.buffer_size:
        yield f"run.group_size = {group_size}: a group does not fit buffer.buffer_size = {config.buffer_size}"
    if baseline is None:
        return
    if config.buffer.kind == "episodes":
        yield f"rewards.group_baseline = {baseline!r}: {config.algorithm} uses the critic as baseline; leave it out"
    for key in ("final_reward_transformation", "sampling_reward_transformation"):
        for name in baselines(config, key):
            yield f"rewards.{key}: {name} is a baseline, but the group already is one; remove it (or set [])"


def _duplicate_problems(config: Config) -> Iterator[str]:
    key, group_size = "rewards.group_baseline = 'duplicate'", config.run.group_size
    if group_size % 2:
        yield f"{key} plays each deal equally often from both seats, so run.group_size = {group_size} must be even"
    for index, env in enumerate(config.train_envs):
        if env.num_players != 2:
            yield f"{key} is for games of two players; train_envs.{index}: {env.env_id} has {env.num_players}"
        elif env.num_actors != 1:
            yield (
                f"{key} compares the policy's games at both seats against one opponent; train_envs.{index}: "
                f"num_actors = {env.num_actors} gives it both seats of {env.env_id}; set num_actors = 1, or use 'rloo'"
            )
    if set(strategies(config.league)) == {"mirror"}:
        yield f"{key} needs an opponent, but league.opponent_sampling_strategy = 'mirror' gives the policy both seats"


def baselines(config: Config, key: str) -> list[str]:
    """Return the names of the baselines among the transforms of a key of section `rewards`."""
    return [name for name in transform_names(getattr(config.rewards, key)) if name in BASELINES]


def branching_problems(config: Config) -> Iterator[str]:
    """Yield each reason why groups cannot start within an earlier game. Plays a game of each training env twice."""
    branching = config.branching
    if not branching.share:
        return
    first, last = branching.window
    if last < first:
        yield f"branching.window = [{first}, {last}]: the last turn must not come before the first"
    if config.run.group_size == 1:
        yield (
            f"branching.share = {branching.share:g}: the games that start from one state are compared, so it needs "
            "run.group_size of 2 or more and rewards.group_baseline = 'grpo', 'mean' or 'rloo'"
        )
    if config.plays_duplicates:
        yield "branching.share: 'duplicate' compares games from both seats at the same deal, which has no branches"
    if all(is_questions(env.env_id) for env in config.train_envs):
        yield "branching.share: a question is one turn, so no group could start after it; add a game to train_envs"
    for index, env in enumerate(config.train_envs):
        if env.max_turns <= first:
            yield (
                f"branching.window: train_envs.{index}: {env.env_id} has max_turns = {env.max_turns}, so it has no "
                f"turn {first} (they count from 0) to start at"
            )
        elif probe(env.env_id, env.num_players, env.observation, env.env_kwargs).problem is not None:
            continue  # reported with the other problems of the envs
        elif (problem := repeat_problem(env)) is not None:
            yield f"branching.share: train_envs.{index}: {env.env_id} {problem}"


def describe_branching(branching: BranchingConfig) -> str:
    """Return a readable description of the groups that start within a game."""
    first, last = branching.window
    turn = {"random": "any turn of the policy", "uncertain": "the turns with the widest returns"}[branching.at]
    window = "" if branching.window == BranchingConfig().window else f" from turn {first} to {last}"
    return f"{branching.share:.0%} of the groups start at {turn}{window}, with {branching.chance} chance"
