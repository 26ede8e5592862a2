"""Reasons why the keys of a config contradict each other, and warnings of those that may.

Rules of one section that pydantic can express stand beside its keys, in `config/`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from unstable_lite.config import Config
from unstable_lite.config.games import LEAST_TEMPERATURE
from unstable_lite.config.training import EMBEDDINGS, no_adapter_at
from unstable_lite.errors import ConfigError, ModelError
from unstable_lite.games.api_keys import url_problem
from unstable_lite.league.opponents import by_policy, frozen_adapters, strategies, uses_checkpoints
from unstable_lite.league.samplers import check_league
from unstable_lite.learner import LEARNERS
from unstable_lite.planning.defaults import active_checkpoints, adapter_slots_needed, algorithm_of, resolve_defaults
from unstable_lite.planning.memory import shape_of
from unstable_lite.planning.policies import policy_rules
from unstable_lite.plugins import suggestion
from unstable_lite.reward_transformations import BASELINES, build_reward_transformations
from unstable_lite.types import BASE


def engine_rules(config: Config) -> Iterator[str]:
    """Yield each reason why engines cannot play with these keys: all that an evaluation needs."""
    engine = config.engine
    if engine.top_p < 1 and not engine.allow_top_p:
        yield (
            f"engine.top_p = {engine.top_p}: importance weights need the whole distribution; set it to 1, or "
            "engine.allow_top_p = true to train on wrong weights"
        )
    limit = f"engine.max_generation_len = {engine.max_generation_len}"
    if engine.max_generation_len >= engine.max_model_len:
        yield f"{limit} leaves no room for a prompt in engine.max_model_len = {engine.max_model_len}"
    if engine.thinking_tokens is not None and engine.thinking_tokens >= engine.max_generation_len:
        yield f"engine.thinking_tokens = {engine.thinking_tokens} leaves no room for an answer in {limit}"
    yield from (no_adapter_at(target) for target in config.lora.target_modules if target in EMBEDDINGS)
    url = config.opponents.base_url
    if url is not None and (problem := url_problem(url)) is not None:
        yield f"opponents.base_url: {problem}"


def worker_rules(config: Config) -> Iterator[str]:
    """Yield each reason why engines and learner cannot work with these keys, be it for a run or for `sft`.

    config: one with the defaults of its algorithm.
    """
    yield from policy_rules(config)
    yield from check_league(config)
    yield from _run_rules(config)
    yield from by_policy(config, _rules_of_policy)


def _rules_of_policy(config: Config) -> Iterator[str]:
    config = resolve_defaults(config)
    yield from _number_rules(config)
    yield from _group_rules(config)
    yield from _algorithm_rules(config)
    yield from _rank_rules(config)
    try:
        build_reward_transformations(config.rewards)
    except ConfigError as error:
        yield from error.problems
    yield from _uid_rules(config)


def training_rules(config: Config) -> Iterator[str]:
    """Yield each reason why a learner cannot train on the samples, or label the results. Not for an evaluation."""
    if config.engine.temperature < LEAST_TEMPERATURE:
        yield (
            f"engine.temperature = {config.engine.temperature:g}: below {LEAST_TEMPERATURE} engines do not sample at "
            "the temperature that the learner divides by; set at least that (`eval` may use less)"
        )
    for env_id, n in Counter(env.env_id for env in config.train_envs).items():
        if n > 1:
            yield f"train_envs: {env_id} is listed {n} times, but averages, curves and samplers use env_id; keep one"
    for (env_id, opponent), n in Counter(config.eval_cells).items():
        if n > 1:
            yield f"eval_envs: {env_id} against {opponent} is listed {n} times; keep one, or set other temperatures"


def _number_rules(config: Config) -> Iterator[str]:
    run, league = config.run, config.league
    buffer_size, batch_size = config.buffer_size, config.learner.batch_size
    size, batch = f"buffer.buffer_size = {buffer_size}", f"learner.batch_size = {batch_size}"
    delay = config.buffer.batch_delay_buffer
    if buffer_size < batch_size:
        yield f"{size} is less than {batch}: the learner would wait forever"
    elif delay * batch_size > buffer_size:
        yield f"buffer.batch_delay_buffer = {delay:g} times {batch} is more than {size}: the learner would wait forever"
    if run.group_size > buffer_size:
        yield f"run.group_size = {run.group_size}: a group does not fit {size}"
    draws_older = uses_checkpoints(league) or any(n == "population" or n.endswith("/past") for n in strategies(league))
    if draws_older and league.max_active_checkpoints == 1:
        yield (
            "league.max_active_checkpoints = 1 allows only the current policy, but opponent_sampling_strategy = "
            f"{league.opponent_sampling_strategy!r} draws older ones: set 2 or more"
        )


def _run_rules(config: Config) -> Iterator[str]:
    """Yield each reason why a run cannot load its adapters at once, or evaluate."""
    run, engine, needed = config.run, config.engine, adapter_slots_needed(config)
    if engine.max_loras < needed:
        of_frozen = f", {frozen} of them for frozen players" if (frozen := len(frozen_adapters(config))) else ""
        remedy = ", or lower league.max_active_checkpoints" * (active_checkpoints(config) > len(config.shares))
        who = f"the league of {', '.join(config.policies)}" if config.policies else "this league"
        yield (
            f"engine.max_loras = {engine.max_loras}: {who} needs at least {needed} adapter slots{of_frozen}; "
            f"raise it{remedy}"
        )
    if run.exact_every is not None and run.exact_samples is None and engine.top_p < 1:
        yield (
            "run.exact_every: probabilities are computed from the whole distribution, not with engine.top_p = "
            f"{engine.top_p:g}; set it to 1, or set run.exact_samples"
        )
    if run.exact_samples is not None and run.exact_every is None:
        yield "run.exact_samples needs run.exact_every, the number of updates between two estimates"
    if run.eval_every and not run.eval_games:
        yield "run.eval_every needs run.eval_games, the number of games per evaluation"
    if run.eval_games and not config.eval_envs:
        yield f"run.eval_games = {run.eval_games}, but there are no eval_envs"


def _group_rules(config: Config) -> Iterator[str]:
    """Yield each reason why games cannot be played in groups of this size, or compared in this way."""
    group_size, baseline = config.run.group_size, config.group_baseline
    key = f"rewards.group_baseline = {baseline!r}"
    if group_size > 1 and baseline is None:
        why = (
            "no baseline compares the games of a group; set rewards.group_baseline to 'grpo', 'mean', 'rloo' or "
            "'duplicate'"
        )
        if algorithm_of(config).has_critic:
            why = f"{config.algorithm} has a critic and cannot learn from groups; set 1, or another algorithm"
        yield f"run.group_size = {group_size}: {why}"
    if baseline is None:
        return
    if group_size < 2:
        where = f"algorithm = {config.algorithm!r}" if config.rewards.group_baseline is None else key
        yield f"{where} compares the games of a group, so run.group_size = {group_size} must be at least 2"
    if baseline not in {"grpo": ("grpo", "mean"), "rloo": ("rloo",)}.get(config.algorithm, (baseline,)):
        yield f"{key} contradicts algorithm = {config.algorithm!r}; leave it out"
    if config.buffer.kind == "episodes":
        yield f"{key}: {config.algorithm} uses the critic as baseline; leave it out, or set another algorithm"
    for name in ("final_reward_transformation", "sampling_reward_transformation"):
        for transform in _baselines(config, name):
            yield f"rewards.{name}: {transform} is a baseline, but the group already is one; remove it (or set [])"
    if not config.plays_duplicates:
        return
    if group_size % 2:
        yield f"{key} plays each deal equally often from both seats, so run.group_size = {group_size} must be even"
    for index, env in enumerate(config.train_envs):
        if env.num_players != 2:
            yield f"{key} is for games of two players; train_envs.{index}: {env.env_id} has {env.num_players}"
        elif env.seats:
            yield f"{key} plays each deal from both seats; leave out train_envs.{index}.seats, or use 'rloo'"
        elif env.num_actors != 1:
            yield (
                f"{key} compares the policy's games at both seats; train_envs.{index}: num_actors = {env.num_actors} "
                f"gives it both seats of {env.env_id}; set num_actors = 1, or use 'rloo'"
            )
    if set(strategies(config.league)) == {"mirror"}:
        yield f"{key} needs an opponent, but league.opponent_sampling_strategy = 'mirror' gives the policy both seats"


def _algorithm_rules(config: Config) -> Iterator[str]:
    """Yield each reason why the algorithm cannot run with these settings."""
    algorithm, learner, name = algorithm_of(config), config.learner, config.algorithm
    if name in LEARNERS:
        if config.buffer.kind != algorithm.batches:
            yield f'buffer.kind = {config.buffer.kind!r}: {name} learns from {algorithm.batches}; leave it at "auto"'
        if learner.options:
            yield f"learner.options: {name} has no options; only a custom algorithm (module:Class) has them"
        if config.lora.initial_critic_path and not algorithm.has_critic:
            yield f"lora.initial_critic_path: {name} has no critic; leave it out"
    if algorithm.is_clipped and learner.ppo_minibatches > learner.batch_size:
        yield (
            f"learner.ppo_minibatches = {learner.ppo_minibatches} is more than learner.batch_size = "
            f"{learner.batch_size}: some minibatches would be empty"
        )
    if config.league.adapter_policy == "game":
        return
    key = "league.adapter_policy = 'turn'"
    if config.run.group_size > 1:
        yield (
            f"{key}: games of a group are compared as games of one policy, but with run.group_size = "
            f"{config.run.group_size} later games and turns would have newer ones; set it to 'game'"
        )
    if algorithm.has_critic or "episodes" in (config.buffer.kind, algorithm.batches):
        yield f"{key}: {name} learns from episodes, which must be the play of one policy; set it to 'game'"


def _rank_rules(config: Config) -> Iterator[str]:
    learner = config.learner
    devices = () if learner.devices == "auto" else learner.devices
    num_ranks = max(1, len(devices)) + learner.remote_ranks
    if num_ranks > learner.batch_size:
        yield (
            f"learner.batch_size = {learner.batch_size} is less than {num_ranks} ranks (learner.devices, "
            "learner.remote_ranks): some would have no step to train on"
        )
    if "cpu" in devices and set(devices) != {"cpu"}:
        yield f"learner.devices = {list(devices)}: put all ranks on GPUs or all on the CPU"
    if bool(learner.remote_ranks) != bool(learner.rendezvous):
        yield "learner.remote_ranks (how many ranks join) and learner.rendezvous (where) need each other: set both"
    host, _, port = (learner.rendezvous or "localhost:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        yield f"learner.rendezvous = {learner.rendezvous!r}: write the address of this machine as HOST:PORT"


def _uid_rules(config: Config) -> Iterator[str]:
    """Yield the options of reward transforms that name an opponent, but not by a uid that one has."""
    names = [name for env in config.train_envs for name in config.league.opponents_in(env)]
    uids = {f"fixed-{name}" for name in [*names, *(env.fixed_opponent for env in config.eval_envs)]}
    lists = (entries for key, entries in config.rewards if key.endswith("_transformation"))
    for entry in (entry for entries in lists for entry in entries or () if not isinstance(entry, str)):
        for option, value in (entry.model_extra or {}).items():
            if not isinstance(value, str) or value in {BASE, *uids}:
                continue
            if re.match(r"fixed-\S*[:/]\S+$", value) or f"fixed-{value}" in uids:
                hint = suggestion(f"fixed-{value.removeprefix('fixed-')}", uids)
                yield f"rewards: {entry.name}: {option} = {value!r} is the uid of no opponent; {hint}"


def loss_rules(config: Config) -> Iterator[str]:
    """Yield each reason why the learner's loss or schedule of a policy cannot be as these keys say."""
    learner, steps, name = config.learner, config.run.learning_steps, config.algorithm
    if config.lora.lora_dropout and name in LEARNERS:  # `sft` and custom algorithms may use it
        yield (
            f"lora.lora_dropout = {config.lora.lora_dropout}: {name} compares each token's probability with the one it "
            "was sampled with, and dropout changes the policy in every pass; set it to 0"
        )
    if learner.learning_rate_warmup >= steps:
        yield (
            f"learner.learning_rate_warmup = {learner.learning_rate_warmup}: the schedule ends after {steps} updates "
            "(run.learning_steps, a policy's part of them, or restart.at_updates), before the learning rate is reached"
        )
    if learner.clip_range_high is not None and name in LEARNERS and not LEARNERS[name].is_clipped:
        yield f"learner.clip_range_high: {name} does not clip; only ppo and grpo do"
    if learner.importance_weight_mode == "mask" and learner.importance_weight_cap <= 1:
        yield (
            f"learner.importance_weight_mode = 'mask' with importance_weight_cap = {learner.importance_weight_cap:g} "
            "would leave out tokens of the newest policy, whose ratio is 1; set a cap above 1"
        )
    if learner.entropy_target is None:
        return
    if not learner.entropy_coefficient:
        yield (
            "learner.entropy_target: the coefficient is adapted by factors, so learner.entropy_coefficient must be "
            "above 0 (0.001 is a start)"
        )
    if learner.coefficient_schedule != "constant":
        yield (
            f"learner.coefficient_schedule = '{learner.coefficient_schedule}': learner.entropy_target already changes "
            "the entropy's coefficient after each update; keep one of the two keys"
        )
    try:
        shape = shape_of(config.model_name)
    except ModelError:  # reported with the other problems of the model
        return
    if shape is not None and learner.entropy_target > (most := math.log(shape.vocab_size)):
        yield (
            f"learner.entropy_target = {learner.entropy_target:g}: a token of {shape.vocab_size} has an entropy of at "
            f"most {most:.2f} nats"
        )


def critic_warnings(config: Config) -> Iterator[str]:
    """Yield the reward transforms that change which policy is best for an algorithm with a critic."""
    if not algorithm_of(config).has_critic:
        return
    config = resolve_defaults(config)
    gamma, why = config.learner.gamma, "changes which policy is best. The critic already is the baseline; remove it"
    for name in _baselines(config, "final_reward_transformation") if gamma < 1 else ():
        yield f"rewards.final_reward_transformation: discounted by learner.gamma = {gamma:g}, {name} {why} (or set [])"
    for name in _baselines(config, "sampling_reward_transformation"):
        yield f"rewards.sampling_reward_transformation: {name} changes every turn of a game, so it {why} (or set [])"


def _baselines(config: Config, key: str) -> list[str]:
    """Return the names of the baselines among the transforms of a key of section `rewards`."""
    entries = getattr(config.rewards, key) or ()
    names = [entry if isinstance(entry, str) else entry.name for entry in entries]
    return [name for name in names if name in BASELINES]
