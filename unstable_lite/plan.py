"""Before anything is spawned: every reason why a config cannot run, and what would go where if it can.

Loads neither torch nor transformers; makes and resets each env once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unstable_lite.alarms import alarm_problems
from unstable_lite.algorithms import algorithm_problems, describe_rewards, dropout_problems, resolve_defaults
from unstable_lite.by_name import suggestion
from unstable_lite.config import EMBEDDINGS, Config, LoraConfig, OpponentsConfig, no_adapter_at, read_config
from unstable_lite.engines.choose import choose_engine, resolve_devices
from unstable_lite.engines.servers import KIND as VLLM_SERVER
from unstable_lite.engines.servers import delivery, server_problems
from unstable_lite.errors import AdapterError, ConfigError, ModelError
from unstable_lite.games.api_keys import url_problem
from unstable_lite.games.environments import Environment, is_isolated, probe
from unstable_lite.games.seats import opponent_problem
from unstable_lite.games.templates import chats_in_use, extraction_problems, known_templates, template_problems
from unstable_lite.games.trial_games import trial_lengths
from unstable_lite.league.samplers import check_league, strategies, uses_checkpoints, uses_fixed
from unstable_lite.learners import LEARNERS
from unstable_lite.memory import shape_of
from unstable_lite.models import has_chat_template, resolve_model
from unstable_lite.outside_files import check_adapter
from unstable_lite.pace import describe as describe_pace
from unstable_lite.reward_transformations import BASELINES, build_reward_transformations
from unstable_lite.sharing import describe_sharing, divide, shared, sharing_problems
from unstable_lite.transport.keys import read_run_keys
from unstable_lite.types import BASE, INHERITED, EvalEnvSpec, TrainEnvSpec

MIB = 1 << 20
LEAST_TRAINED_TEMPERATURE = 0.01
"""Below it engines do not sample at what they are told: vLLM raises it to this, and of the lowest, all take the most
probable token and report it as at temperature 1. The learner would divide by what stands in the config."""

ENGINE_THREADS_ON_GPU = 1
"""vLLM warns that more threads than this wait for each other in its host code."""
LEARNER_THREADS_ON_GPU = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A config that can run, and what was decided about it."""

    config: Config
    """With `engine.kind` and all that depends on the algorithm decided."""
    engine_reason: str
    engine_devices: tuple[int | str, ...]
    learner_devices: tuple[int | str, ...]
    """One rank for each."""
    engine_threads: int
    learner_threads: int
    adapter_slots_needed: int
    active_checkpoints: int
    """How many can be played at once, the current one included."""
    adapter_bytes: int | None
    """float32 size of one adapter, where the model's config.json is at hand."""
    game_lengths: dict[str, list[int]]
    """Turns of some games of random moves, by training env; none where no random player knows the moves."""

    @property
    def shared_devices(self) -> list[int | str]:
        """Both engine's and learner's."""
        return shared(self.engine_devices, self.learner_devices)

    @property
    def divided(self) -> Config:
        """The config as workers get it: with their parts of a GPU that they share."""
        return divide(self.config, self.engine_devices, self.learner_devices)

    @property
    def learner_device(self) -> int | str:
        """Of rank 0."""
        return self.learner_devices[0]

    @property
    def num_ranks(self) -> int:
        """Of the learner, on all machines."""
        return len(self.learner_devices) + self.config.learner.remote_ranks

    @property
    def num_eval_workers(self) -> int:
        """Evaluation games in flight beside training."""
        return self.config.run.num_eval_workers if self.config.eval_envs else 0

    def opponents(self) -> str:
        """Who sits where the current policy does not."""
        league = self.config.league
        if all(spec.num_actors == spec.num_players for spec in self.config.train_envs):
            ignored = league.opponent_sampling_strategy != "none"
            remark = f" (so opponent_sampling_strategy = {league.opponent_sampling_strategy} is not used)" * ignored
            return f"none: num_actors = num_players, every seat is the current policy's{remark}"
        fixed = f", fixed ones: {', '.join(league.fixed_opponents) or 'none'}" * uses_fixed(league)
        return f"{league.opponent_sampling_strategy}{fixed}"

    def describe(self) -> list[tuple[str, str]]:
        """(what, where) of every process and memory, for a person."""
        config, rows = self.config, []
        for index, device in enumerate(self.engine_devices):
            rows.append((f"engine-{index}", f"{config.engine.kind} on {_device(device, self.engine_threads)}"))
        if config.remote.workers:
            rows.append(("remote engines", f"up to {config.remote.workers}, which connect to {config.remote.bind}"))
        rows.append(("engine choice", self.engine_reason))
        for rank, device in enumerate(self.learner_devices):
            place = _device(device, self.learner_threads)
            rows.append((f"learner-{rank}", place) if rank else ("learner", f"{config.algorithm} on {place}"))
        if remote := config.learner.remote_ranks:
            join = f"torchrun … -m unstable_lite.learners.join {config.learner.rendezvous}"
            rows.append(("elsewhere", f"{remote} more of the learner's ranks: {join}"))
        if self.num_ranks > 1:
            base = ", and of the frozen base" * config.learner.shard_base
            rows.append(("learner ranks", f"{self.num_ranks}: each a part of every batch, cut by tokens{base}"))
        rows += describe_sharing(config, self.engine_devices, self.learner_devices)
        rows.append(("base model", config.model_name))
        rows += [("differs", difference) for difference in played_otherwise(config)]
        rows.append(("opponents", self.opponents()))
        if self.active_checkpoints > 1:
            least, most = config.league.opponent_lag
            by = f"by {config.league.active_checkpoints_by}, {least} to {most} updates back"
            rows.append(("older checkpoints", f"{self.active_checkpoints - 1} at most as opponents, {by}"))
        slots = f"{config.engine.max_loras} a worker; at least {self.adapter_slots_needed} needed"
        rows.append(("adapter slots", slots))
        if self.adapter_bytes is not None:
            total = self.adapter_bytes * adapters_in_memory(config)
            size = f"{self.adapter_bytes / MIB:.1f} MiB an adapter, up to {total / MIB:.0f} MiB in shared memory"
            rows.append(("adapters", size))
        if config.engine.kind == VLLM_SERVER:
            rows.append(("adapters to the servers", delivery(config.engine)))
        memory = (
            "the servers' own"
            if config.engine.kind == VLLM_SERVER
            else f"{self.divided.engine.gpu_share:.0%} of the GPU"
            if set(self.engine_devices) != {"cpu"}
            else f"up to {config.engine.kv_cache_gb:g} GB for the KV cache"
        )
        rows.append(("engine memory", memory))
        games = f"{config.run.num_collection_workers} training, {self.num_eval_workers} evaluation"
        if config.run.mode == "sync":
            games = f"rounds of at most {config.run.num_collection_workers}, each to its end; then the learner learns"
        rows.append(("games in flight", games))
        rows += describe_pace(config, self.game_lengths, self.active_checkpoints)
        specs: list[TrainEnvSpec | EvalEnvSpec] = [*config.train_envs, *config.eval_envs]
        isolated = [
            spec.env_id for spec in specs if is_isolated(spec.env_id, spec.num_players, spec.observation, spec.isolated)
        ]
        if isolated:
            rows.append(("isolated", f"{', '.join(dict.fromkeys(isolated))}: in processes that can be killed"))
        if config.run.group_size > 1:
            rows.append(
                ("groups", f"{config.run.group_size} games from each start, compared by {config.group_baseline}")
            )
        batches = f"batches of {config.learner.batch_size}"
        whole = ", whole trajectories" * (config.buffer.kind == "episodes")
        rows.append(("buffer", f"{config.buffer_size} steps, {batches}{whole}"))
        rows.append(("rewards", describe_rewards(config.rewards)))
        return rows + [("warning", text) for text in _critic_warnings(config)]


def played_otherwise(config: Config) -> Iterator[str]:
    """Yield how an eval env is played otherwise than the training env of the same id."""
    trained = {env.env_id: env for env in config.train_envs}
    for env in config.eval_envs:
        if (other := trained.get(env.env_id)) is None:
            continue
        pairs = ((key, getattr(env, key), getattr(other, key)) for key in INHERITED)
        if differing := [f"{key} = {own!r}, trained with {its!r}" for key, own, its in pairs if own != its]:
            yield f"{env.env_id} against {env.opponent} is evaluated with {'; '.join(differing)}"


def _critic_warnings(config: Config) -> Iterator[str]:
    """Yield which reward transforms give an algorithm with a critic another game to learn."""
    known, gamma = LEARNERS.get(config.algorithm), config.learner.gamma
    if known is None or not known.has_critic:
        return
    way_out = "The critic is the baseline already; take it out (or set [])"
    if gamma < 1:
        for name in _baselines(config, "final_reward_transformation"):
            yield (
                f"rewards.final_reward_transformation: with learner.gamma = {gamma:g}, {name} changes which policy is "
                f"best, because what it leaves of a reward is discounted instead of the reward. {way_out}"
            )
    for name in _baselines(config, "sampling_reward_transformation"):
        yield (
            f"rewards.sampling_reward_transformation: {name} takes something off every turn, and {config.algorithm} "
            f"adds up the turns of a game, so their number changes which policy is best. {way_out}"
        )


def load_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read, validate and plan. Raises ConfigError with every problem at once, of form and of meaning."""
    config, problems = read_config(path, overrides)
    if config is not None:
        problems += [f"{path}: {problem}" for problem in find_problems(config)]
    if problems or config is None:
        raise ConfigError(*problems)
    return make_plan(config)


def make_plan(config: Config, side_by_side: bool = True) -> Plan:
    """Decide devices, engine and threads for a config. Raises ConfigError with every problem of meaning.

    `side_by_side`: it is to be a run: engines and a learner at the same time, which may have to share a device, and a
    run directory.
    """
    if problems := find_problems(config, side_by_side):
        raise ConfigError(*problems)
    config = resolve_defaults(config)
    engine_devices, learner_devices = _devices(config)
    kind, reason = choose_engine(config.engine.kind, engine_devices)
    workers_on_cpu = [*engine_devices, *learner_devices].count("cpu")
    share = max(1, len(os.sched_getaffinity(0)) // max(1, workers_on_cpu))
    return Plan(
        config=config.model_copy(update={"engine": config.engine.model_copy(update={"kind": kind})}),
        engine_reason=reason,
        engine_devices=engine_devices,
        learner_devices=learner_devices,
        engine_threads=config.engine.threads or (share if "cpu" in engine_devices else ENGINE_THREADS_ON_GPU),
        learner_threads=config.learner.threads or (share if "cpu" in learner_devices else LEARNER_THREADS_ON_GPU),
        adapter_slots_needed=adapter_slots_needed(config),
        active_checkpoints=active_checkpoints(config),
        adapter_bytes=_adapter_bytes(config),
        game_lengths={spec.env_id: trial_lengths(spec) for spec in config.train_envs} if side_by_side else {},
    )


def active_checkpoints(config: Config) -> int:
    """Checkpoints that can be played at once, the current one included."""
    league = config.league
    if league.max_active_checkpoints is not None:
        return league.max_active_checkpoints
    has_opponents = any(spec.num_actors < spec.num_players for spec in config.train_envs)
    if not uses_checkpoints(league) or not has_opponents:
        return 1
    least, most = league.opponent_lag
    wanted = 1 + max(1, most - max(least, 1) + 1)
    if "lagged" in strategies(league):
        return wanted
    return max(2, min(wanted, config.engine.max_loras - _slots_besides_active(config, has_pool=True)))


def adapter_slots_needed(config: Config) -> int:
    """For the active checkpoints, and for adapters that come and go."""
    active = active_checkpoints(config)
    return active + _slots_besides_active(config, has_pool=active > 1)


def adapters_in_memory(config: Config) -> int:
    """Shared memory that a run may need, in sizes of one adapter: those that are loaded, the next one, one that comes
    back; and what the learner keeps of this version, of the next and of one that is being saved, with two moments and
    as much again for a critic."""
    known = LEARNERS.get(config.algorithm)
    return config.engine.max_loras + 2 + 3 * 3 * (2 if known is not None and known.has_critic else 1)


def _slots_besides_active(config: Config, has_pool: bool) -> int:
    """One for the next adapter, while the last one is still played; one for an opponent that leaves while another
    comes; one for what is evaluated while training goes on."""
    return 1 + has_pool + bool(config.run.eval_every)


def find_problems(config: Config, side_by_side: bool = True) -> list[str]:
    """Every impossible combination and every name that names nothing."""
    config = resolve_defaults(config)
    problems = [*_env_problems(config), *check_league(config), *_number_problems(config), *algorithm_problems(config)]
    problems += [*_rank_problems(config), *(_directory_problems(config) if side_by_side else [])]
    problems += [*learning_problems(config), *dropout_problems(config)] if side_by_side else []
    problems += [no_adapter_at(target) for target in config.lora.target_modules if target in EMBEDDINGS]
    problems += [*template_problems(config.templates), *_spending_problems(config.opponents)]
    problems += alarm_problems(config.alarms)
    try:
        build_reward_transformations(config.rewards)
    except ConfigError as error:
        problems += error.problems
    try:
        shape_of(config.model_name)
        problems += _chat_problems(config)
    except ModelError as error:
        problems.append(str(error))
    for key in ("initial_lora_path", "initial_critic_path"):
        if (path := getattr(config.lora, key)) is not None:
            problems += adapter_problems(f"lora.{key}", path, config.lora)
    problems += _remote_problems(config)
    problems += _unknown("algorithm", config.algorithm, LEARNERS, may_be_import=True)
    engine_kinds = ("auto", "vllm", "transformers", VLLM_SERVER, "scripted")
    problems += _unknown("engine.kind", config.engine.kind, engine_kinds, may_be_import=True)
    problems += server_problems(config.engine)
    if not problems:
        try:
            engine_devices, learner_devices = _devices(config)
            kind, _ = choose_engine(config.engine.kind, engine_devices)
        except ConfigError as error:
            problems += error.problems
        else:
            problems += sharing_problems(config, kind, engine_devices, learner_devices) if side_by_side else []
    if config.tracker.wandb_project and importlib.util.find_spec("wandb") is None:
        problems.append("tracker.wandb_project: wandb is not installed; pip install 'unstable-lite[wandb]'")
    return problems


def learning_problems(config: Config) -> Iterable[str]:
    """Why what is sampled cannot be learnt from, or what came of it not be told. An evaluation has no such problems."""
    if config.engine.temperature < LEAST_TRAINED_TEMPERATURE:
        yield (
            f"engine.temperature = {config.engine.temperature:g}: below {LEAST_TRAINED_TEMPERATURE} engines do not "
            "sample at the temperature that the learner divides by; set at least that (without training, as in `eval`, "
            "any will do)"
        )
    for env_id, n in Counter(env.env_id for env in config.train_envs).items():
        if n > 1:
            yield f"train_envs: {env_id} is there {n} times: averages, curves and samplers go by env_id; keep one"
    for (env_id, opponent), n in Counter((env.env_id, env.opponent) for env in config.eval_envs).items():
        if n > 1:
            yield f"eval_envs: {env_id} against {opponent} is there {n} times: results go by these two; keep one"


def adapter_problems(where: str, directory: Path, lora: LoraConfig) -> Iterable[str]:
    """Why the adapter in `directory` is not of the kind that section `lora` describes."""
    try:
        stored, header = check_adapter(directory)
    except AdapterError as error:
        yield f"{where}: {error}"
        return
    if not isinstance(stored.get("target_modules"), list):
        names = sorted({name.split(".")[-3] for name in header})
        yield (
            f"{where}: {directory} does not name its target_modules; set them in its adapter_config.json: "
            f"{json.dumps(names)}"
        )
        return
    theirs = {
        "lora_rank": stored["r"],
        "lora_alpha": float(stored["lora_alpha"]),
        "target_modules": sorted(stored["target_modules"]),
    }
    ours = {
        "lora_rank": lora.lora_rank,
        "lora_alpha": float(lora.lora_alpha),
        "target_modules": sorted(lora.target_modules),
    }
    different = [f"{key} is {value} there, {ours[key]} here" for key, value in theirs.items() if value != ours[key]]
    if different:
        yield f"{where}: {directory} does not fit section lora: {'; '.join(different)}; set them alike"


def _rank_problems(config: Config) -> Iterable[str]:
    learner = config.learner
    devices = () if learner.devices == "auto" else learner.devices
    num_ranks = max(1, len(devices)) + learner.remote_ranks
    if learner.shard_base and num_ranks < 2:
        yield "learner.shard_base needs several ranks: name two or more in learner.devices"
    if num_ranks > learner.batch_size:
        yield (
            f"learner.batch_size = {learner.batch_size} leaves some of {num_ranks} ranks (learner.devices, "
            "learner.remote_ranks) without a step to learn from"
        )
    if "cpu" in devices and set(devices) != {"cpu"}:
        yield f"learner.devices = {list(devices)}: ranks are all on GPUs or all on the CPU"
    if bool(learner.remote_ranks) != bool(learner.rendezvous):
        yield "learner.remote_ranks and learner.rendezvous need each other: how many ranks join, and where"
    host, _, port = (learner.rendezvous or "localhost:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        yield f"learner.rendezvous = {learner.rendezvous!r}: write it as HOST:PORT, as other machines see this one"


def _number_problems(config: Config) -> Iterable[str]:
    engine, batch_size = config.engine, config.learner.batch_size
    if config.buffer_size < batch_size:
        yield (
            f"buffer.buffer_size = {config.buffer_size} is under learner.batch_size = {batch_size}: "
            "the learner would wait for ever"
        )
    if engine.top_p < 1 and not engine.allow_top_p:
        yield (
            f"engine.top_p = {engine.top_p}: importance weights need the whole distribution; set it to 1, or "
            "engine.allow_top_p = true to train on wrong weights"
        )
    if engine.max_generation_len >= engine.max_model_len:
        yield (
            f"engine.max_generation_len = {engine.max_generation_len} leaves no room for a prompt within "
            f"engine.max_model_len = {engine.max_model_len}"
        )
    if engine.max_loras < (needed := adapter_slots_needed(config)):
        way_out = "; raise it, or lower league.max_active_checkpoints" * (active_checkpoints(config) > 1)
        yield f"engine.max_loras = {engine.max_loras}: this league needs at least {needed} adapter slots{way_out}"
    if uses_checkpoints(config.league) and config.league.max_active_checkpoints == 1:
        yield (
            "league.max_active_checkpoints = 1 is the current policy alone, and "
            f"opponent_sampling_strategy = {config.league.opponent_sampling_strategy!r} draws older ones: at least 2"
        )
    if config.buffer.batch_delay_buffer * batch_size > config.buffer_size >= batch_size:
        yield (
            f"buffer.batch_delay_buffer = {config.buffer.batch_delay_buffer:g} times learner.batch_size = {batch_size} "
            f"is over buffer.buffer_size = {config.buffer_size}: the learner would wait for ever"
        )
    yield from _group_problems(config)
    if config.run.loop_stall_s <= config.run.env_timeout_s:
        yield (
            f"run.loop_stall_s = {config.run.loop_stall_s:g} must be over run.env_timeout_s = "
            f"{config.run.env_timeout_s:g}, for which a call into an env may hold up the event loop"
        )
    if config.run.eval_every and not config.run.eval_games:
        yield "run.eval_every needs run.eval_games, the number of games per evaluation"
    if config.run.max_eval_games_per_ckpt and not config.run.num_eval_workers:
        yield "run.max_eval_games_per_ckpt bounds the games of run.num_eval_workers, and that is 0"
    if config.run.eval_games and not config.eval_envs:
        yield f"run.eval_games = {config.run.eval_games}, but there are no eval_envs"


def _directory_problems(config: Config) -> Iterable[str]:
    """Why no run directory can be made, or none that `runs` and `top` would find."""
    name = config.run.name or ""
    if "/" in name or not name.isprintable() or name.startswith("."):
        yield (
            f"run.name = {name!r} is to be part of a directory's name: no slash in it, no control character, and no "
            "dot in front"
        )
    output = config.run.output_dir
    try:
        parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    except OSError as error:
        yield f"run.output_dir = {str(output)[:100]!r}: {error.strerror}"
        return
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield f"run.output_dir = {output}: {parent} is not a directory that can be written to"


def _group_problems(config: Config) -> Iterable[str]:
    group_size, baseline = config.run.group_size, config.group_baseline
    if baseline is not None and group_size < 2:
        key = f"algorithm = {config.algorithm!r}" if config.rewards.group_baseline is None else "rewards.group_baseline"
        yield f"{key} compares the games of a group: run.group_size = {group_size} must be at least 2"
    if group_size > 1 and baseline is None:
        yield (
            f"run.group_size = {group_size}: nothing compares the games of a group; "
            "set rewards.group_baseline to 'grpo' or 'rloo'"
        )
    if config.algorithm in ("grpo", "rloo") and baseline != config.algorithm:
        yield f"rewards.group_baseline = {baseline!r} contradicts algorithm = {config.algorithm!r}; leave it out"
    if group_size > config.buffer_size:
        yield f"run.group_size = {group_size}: a group does not fit buffer.buffer_size = {config.buffer_size}"
    if baseline is None:
        return
    if config.buffer.kind == "episodes":
        yield f"rewards.group_baseline = {baseline!r}: {config.algorithm} has the critic for a baseline; leave it out"
    for key in ("final_reward_transformation", "sampling_reward_transformation"):
        for name in _baselines(config, key):
            yield f"rewards.{key}: {name} is a baseline, and the group is one already; take it out (or set [])"


def _baselines(config: Config, key: str) -> list[str]:
    """Return the names of the baselines among the transforms of a key of section `rewards`."""
    names = [entry if isinstance(entry, str) else entry.name for entry in getattr(config.rewards, key)]
    return [name for name in names if name in BASELINES]


def _env_problems(config: Config) -> Iterable[str]:
    entries: list[tuple[str, TrainEnvSpec | EvalEnvSpec]] = [
        *((f"train_envs.{index}", spec) for index, spec in enumerate(config.train_envs)),
        *((f"eval_envs.{index}", spec) for index, spec in enumerate(config.eval_envs)),
    ]
    for where, spec in entries:
        facts = probe(spec.env_id, spec.num_players, spec.observation)
        if facts.problem is not None:
            yield f"{where}: env_id = {spec.env_id!r}: {facts.problem}"
        if spec.max_turns < 1:
            yield f"{where}: max_turns = {spec.max_turns} must be at least 1"
        yield from _unknown(f"{where}: prompt_template", spec.prompt_template, known_templates(config.templates))
        for problem in extraction_problems(spec.action_extraction_fn):
            yield f"{where}: {problem}"
        for name in _opponents(config, spec):
            observation = None
            if facts.problem is None:
                observation = Environment(spec.env_id, spec.num_players, 0, spec.observation).observe()[1]
            if (reason := opponent_problem(name, spec.env_id, observation, config.opponents)) is not None:
                yield f"{where}: {reason}"


def _chat_problems(config: Config) -> Iterable[str]:
    """Where the model's files are at hand; of any other, its engine tells at its start."""
    model = Path(resolve_model(config.model_name))
    needs_one = [repr(chat.name) for chat in chats_in_use(config)]
    if not needs_one:
        return
    if config.engine.kind == "scripted":
        yield f"prompt_template {', '.join(needs_one)}: engine.kind = 'scripted' has no tokenizer, so no chat template"
    elif model.is_dir() and not has_chat_template(model):
        yield (
            f"prompt_template {', '.join(needs_one)}: the tokenizer of {config.model_name} has no chat template; "
            "choose a template that brings its own markup"
        )


def _remote_problems(config: Config) -> Iterable[str]:
    remote = config.remote
    if not remote.workers:
        return
    if not re.fullmatch(r"tcp://(\*|[^\s:/]+|\[[0-9a-fA-F:]+\]):(\*|\d{1,5})", remote.bind):
        yield f"remote.bind = {remote.bind!r} is no address; write tcp://HOST:PORT, with 0.0.0.0 for every network"
    try:
        read_run_keys(remote.keys)
    except ConfigError as error:
        yield from (f"remote.keys: {problem}" for problem in error.problems)
    if config.run.mode == "sync":
        yield "remote.workers: run.mode = 'sync' repeats to the last bit, and machines that come and go do not"
    if config.engine.kind == VLLM_SERVER:
        yield f"remote.workers: servers are engine.kind = {VLLM_SERVER!r}'s own way to other machines; choose one way"
    if not config.engine.devices and config.engine.kind == "auto":
        yield "engine.devices = []: name engine.kind, since auto looks at the devices of this machine"


def _spending_problems(opponents: OpponentsConfig) -> Iterable[str]:
    if opponents.base_url is not None and (problem := url_problem(opponents.base_url)) is not None:
        yield f"opponents.base_url: {problem}"
    if opponents.max_usd and not (
        opponents.usd_per_million_prompt_tokens or opponents.usd_per_million_completion_tokens
    ):
        yield (
            "opponents.max_usd needs the prices: opponents.usd_per_million_prompt_tokens and "
            "opponents.usd_per_million_completion_tokens"
        )
    if opponents.pause_s > opponents.max_pause_s:
        yield f"opponents.pause_s = {opponents.pause_s:g} is over opponents.max_pause_s = {opponents.max_pause_s:g}"


def _opponents(config: Config, spec: TrainEnvSpec | EvalEnvSpec) -> Iterable[str]:
    """The fixed opponents that may be seated in this env."""
    if spec.num_players == 1:
        return []
    if isinstance(spec, EvalEnvSpec):
        return [spec.fixed_opponent] if spec.fixed_opponent != BASE else []
    is_seated = spec.num_actors < spec.num_players and uses_fixed(config.league)
    return config.league.fixed_opponents if is_seated else []


def _unknown(where: str, name: str, known: Iterable[str], may_be_import: bool = False) -> list[str]:
    if name in known:
        return []
    if may_be_import and ":" in name:
        module = name.partition(":")[0]
        try:
            found = importlib.util.find_spec(module)  # looks without loading: it may import torch
        except (ImportError, ValueError):
            found = None
        return [] if found else [f"{where} = {name!r}: no module {module!r} can be imported from here"]
    return [f"{where} = {name!r} is not known; {suggestion(name, known)}"]


def _adapter_bytes(config: Config) -> int | None:
    """float32 size of the LoRA on the usual linear layers; None where the model's shape is not known."""
    shape = shape_of(config.model_name)
    return (4 * shape.lora_parameters(config.lora) or None) if shape else None


def _devices(config: Config) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
    """Of engines and learner; an engine that talks to a server is where that server is."""
    engine, learner = config.engine, config.learner
    if engine.kind == VLLM_SERVER:
        return engine.urls, resolve_devices(("cpu",), learner.devices)[1]
    return resolve_devices(
        engine.devices,
        learner.devices,
        are_engines_elsewhere=config.remote.workers > 0,
        are_together=config.run.mode in ("share", "sleep"),
    )


def _device(device: int | str, threads: int) -> str:
    if isinstance(device, str) and device != "cpu":
        return device
    return f"the CPU, {threads} thread{'s' if threads > 1 else ''}" if device == "cpu" else f"GPU {device}"
