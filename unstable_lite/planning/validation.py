"""Find every reason why a config cannot run, and settings that deserve a warning. Makes and resets each env once.

Loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from unstable_lite.adapters.frozen import is_frozen
from unstable_lite.adapters.peft_files import check_adapter
from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.config.games import INHERITED, LEAST_TEMPERATURE, EvalEnvSpec, OpponentsConfig, TrainEnvSpec
from unstable_lite.config.training import EMBEDDINGS, EngineConfig, LoraConfig, no_adapter_at
from unstable_lite.engines.vllm_server.config_checks import KIND as VLLM_SERVER
from unstable_lite.engines.vllm_server.config_checks import server_problems
from unstable_lite.errors import AdapterError, ConfigError, ModelError
from unstable_lite.games.api_keys import url_problem
from unstable_lite.games.env_catalogue import probe
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.players.factory import BLIND, opponent_problem
from unstable_lite.games.templates import chats_in_use, extraction_problems, known_templates, template_problems
from unstable_lite.league.opponents import frozen_adapters, training_opponents, uses_checkpoints
from unstable_lite.league.samplers import check_league
from unstable_lite.learner import LEARNERS
from unstable_lite.models import chat_template, resolve_model
from unstable_lite.planning.adapter_slots import active_checkpoints, adapter_slots_needed
from unstable_lite.planning.algorithm_defaults import (
    algorithm_of,
    algorithm_problems,
    resolve_defaults,
)
from unstable_lite.planning.exact import exact_problems
from unstable_lite.planning.frozen_players import frozen_problems
from unstable_lite.planning.groups import baselines, branching_problems, group_problems
from unstable_lite.planning.lengths import length_problems
from unstable_lite.planning.machine import machine_problems
from unstable_lite.planning.memory import shape_of
from unstable_lite.planning.objective import objective_problems
from unstable_lite.planning.placement import devices_of, placement_problems
from unstable_lite.planning.questions import question_problems
from unstable_lite.plugins import suggestion
from unstable_lite.reward_transformations import build_reward_transformations


def find_problems(config: Config, copies: Path | None = None) -> list[str]:
    """Return every reason why a run with this config cannot start.

    copies: directory of the run's copies of frozen players, if it is the config of a run.
    """
    problems = [
        *find_worker_problems(config),
        *frozen_problems(frozen_adapters(config), config, copies),
        *_directory_problems(config),
        *learning_problems(config),
        *objective_problems(config),
        *branching_problems(config),
    ]
    return problems or list(placement_problems(config, *devices_of(config)))


def find_worker_problems(config: Config, has_engines: bool = True) -> list[str]:
    """Return every reason why engines or learner cannot do their work, be it for a run or for `sft`."""
    config = resolve_defaults(config)
    problems = [*find_engine_problems(config), *check_league(config), *_number_problems(config)]
    problems += [*algorithm_problems(config), *_rank_problems(config)]
    try:
        build_reward_transformations(config.rewards)
    except ConfigError as error:
        problems += error.problems
    for key in ("initial_lora_path", "initial_critic_path"):
        if (path := getattr(config.lora, key)) is not None:
            problems += adapter_problems(f"lora.{key}", path, config.lora)
    problems += _unknown("algorithm", config.algorithm, LEARNERS, may_be_import=True)
    if config.learner.kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        problems.append("learner.kernels = 'liger': it is not installed; pip install 'unstable-lite[liger]'")
    if config.tracker.wandb_project and importlib.util.find_spec("wandb") is None:
        problems.append("tracker.wandb_project: wandb is not installed; pip install 'unstable-lite[wandb]'")
    return problems or _device_problems(config, has_engines)


def find_engine_problems(config: Config) -> list[str]:
    """Return every reason why engines cannot play the games of the config's envs: all that an evaluation needs."""
    problems = [*_env_problems(config), *_sampling_problems(config.engine), *question_problems(config)]
    problems += [no_adapter_at(target) for target in config.lora.target_modules if target in EMBEDDINGS]
    problems += [*template_problems(config.templates), *_spending_problems(config.opponents)]
    try:
        shape_of(config.model_name)
        problems += _chat_problems(config)
    except ModelError as error:
        problems.append(str(error))
    engine_kinds = ("auto", "vllm", "transformers", VLLM_SERVER, "scripted")
    problems += _unknown("engine.kind", config.engine.kind, engine_kinds, may_be_import=True)
    return [*problems, *server_problems(config.engine)]


def _device_problems(config: Config, has_engines: bool) -> list[str]:
    try:
        engine_devices, learner_devices = devices_of(config)
        return list(machine_problems(config, engine_devices if has_engines else (), learner_devices))
    except ConfigError as error:
        return list(error.problems)


def learning_problems(config: Config) -> Iterable[str]:
    """Yield each reason why a run cannot train on its samples or label its results. Not for an evaluation."""
    if config.engine.temperature < LEAST_TEMPERATURE:
        yield (
            f"engine.temperature = {config.engine.temperature:g}: below {LEAST_TEMPERATURE} engines do not "
            "sample at the temperature that the learner divides by; set at least that (only training, not `eval`, "
            "needs it)"
        )
    for env_id, n in Counter(env.env_id for env in config.train_envs).items():
        if n > 1:
            yield f"train_envs: {env_id} is listed {n} times, but averages, curves and samplers use env_id; keep one"
    for (env_id, opponent), n in Counter((env.env_id, env.opponent) for env in config.eval_envs).items():
        if n > 1:
            yield f"eval_envs: {env_id} against {opponent} is listed {n} times; keep one, or set other temperatures"


def adapter_problems(where: str, directory: Path, lora: LoraConfig) -> Iterable[str]:
    """Yield each reason why the adapter in `directory` does not fit section `lora`."""
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
    pairs = (
        ("lora_rank", stored["r"], lora.lora_rank),
        ("lora_alpha", float(stored["lora_alpha"]), float(lora.lora_alpha)),
        ("target_modules", sorted(stored["target_modules"]), sorted(lora.target_modules)),
    )
    different = [f"{key} is {value}, not {ours}" for key, value, ours in pairs if value != ours]
    if different:
        yield f"{where}: {directory} does not fit section lora: {'; '.join(different)}; set section lora to the same"


def _rank_problems(config: Config) -> Iterable[str]:
    learner = config.learner
    devices = () if learner.devices == "auto" else learner.devices
    num_ranks = max(1, len(devices)) + learner.remote_ranks
    if learner.shard_base and num_ranks < 2:
        yield "learner.shard_base needs several ranks: name two or more devices in learner.devices"
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


def _sampling_problems(engine: EngineConfig) -> Iterable[str]:
    if engine.top_p < 1 and not engine.allow_top_p:
        yield (
            f"engine.top_p = {engine.top_p}: importance weights need the whole distribution; set it to 1, or "
            "engine.allow_top_p = true to train on wrong weights"
        )
    yield from length_problems(engine)


def _number_problems(config: Config) -> Iterable[str]:
    engine, batch_size = config.engine, config.learner.batch_size
    if config.buffer_size < batch_size:
        yield (
            f"buffer.buffer_size = {config.buffer_size} is less than learner.batch_size = {batch_size}: "
            "the learner would wait forever"
        )
    if engine.max_loras < (needed := adapter_slots_needed(config)):
        way_out = "; raise it" + ", or lower league.max_active_checkpoints" * (active_checkpoints(config) > 1)
        frozen = len(frozen_adapters(config))
        theirs = f", {frozen} of them for frozen players" * bool(frozen)
        slots = f"at least {needed} adapter slots{theirs}"
        yield f"engine.max_loras = {engine.max_loras}: this league needs {slots}{way_out}"
    if uses_checkpoints(config.league) and config.league.max_active_checkpoints == 1:
        yield (
            "league.max_active_checkpoints = 1 allows only the current policy, but "
            f"opponent_sampling_strategy = {config.league.opponent_sampling_strategy!r} draws older ones: set 2 or more"
        )
    if config.buffer.batch_delay_buffer * batch_size > config.buffer_size >= batch_size:
        yield (
            f"buffer.batch_delay_buffer = {config.buffer.batch_delay_buffer:g} times learner.batch_size = {batch_size} "
            f"is more than buffer.buffer_size = {config.buffer_size}: the learner would wait forever"
        )
    yield from group_problems(config)
    if config.run.loop_stall_s <= config.run.env_timeout_s:
        yield (
            f"run.loop_stall_s = {config.run.loop_stall_s:g} must be more than run.env_timeout_s = "
            f"{config.run.env_timeout_s:g}, because a call into an env may block the event loop for that long"
        )
    yield from _evaluation_problems(config)


def _evaluation_problems(config: Config) -> Iterable[str]:
    yield from exact_problems(config)
    if config.run.eval_every and not config.run.eval_games:
        yield "run.eval_every needs run.eval_games, the number of games per evaluation"
    if config.run.max_eval_games_per_ckpt and not config.run.num_eval_workers:
        yield "run.max_eval_games_per_ckpt limits the games of run.num_eval_workers, which is 0"
    if config.run.eval_games and not config.eval_envs:
        yield f"run.eval_games = {config.run.eval_games}, but there are no eval_envs"


def _directory_problems(config: Config) -> Iterable[str]:
    """Yield each reason why a run directory cannot be made, or would not be found by `runs` and `top`."""
    name = config.run.name or ""
    if "/" in name or not name.isprintable() or name.startswith("."):
        yield (
            f"run.name = {name!r} becomes part of a directory name: it must not contain a slash or a control character "
            "or start with a dot"
        )
    output = config.run.output_dir
    try:
        parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    except OSError as error:
        yield f"run.output_dir = {str(output)[:100]!r}: {error.strerror}"
        return
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield f"run.output_dir = {output}: {parent} is not a directory that can be written to"


def _env_problems(config: Config) -> Iterable[str]:
    entries: list[tuple[str, TrainEnvSpec | EvalEnvSpec]] = [
        *((f"train_envs.{index}", spec) for index, spec in enumerate(config.train_envs)),
        *((f"eval_envs.{index}", spec) for index, spec in enumerate(config.eval_envs)),
    ]
    for where, spec in entries:
        if (reason := probe(spec.env_id, spec.num_players, spec.observation, spec.env_kwargs).problem) is not None:
            yield f"{where}: env_id = {spec.env_id!r}: {reason}"
        if spec.reward_scale is not None and not is_openspiel(spec.env_id):
            yield f"{where}: reward_scale = {spec.reward_scale:g} is for openspiel:NAME only; leave it out"
        if spec.max_turns < 1:
            yield f"{where}: max_turns = {spec.max_turns} must be at least 1"
        yield from _unknown(f"{where}: prompt_template", spec.prompt_template, known_templates(config.templates))
        for problem in extraction_problems(spec.action_extraction_fn):
            yield f"{where}: {problem}"
        for name in _opponents(config, spec):
            if (reason := why_not_seated(name, spec, config.opponents)) is not None:
                yield f"{where}: {reason}"


def why_not_seated(name: str, spec: TrainEnvSpec | EvalEnvSpec, opponents: OpponentsConfig) -> str | None:
    """Return the reason why an opponent cannot play in an env; None if it can."""
    if spec.env_kwargs and name.startswith(BLIND):
        return f"opponent {name!r} searches the env with its default arguments, and env_kwargs sets others"
    is_fine = probe(spec.env_id, spec.num_players, spec.observation, spec.env_kwargs).problem is None
    observation = environment_of(spec, 0).observe()[1] if is_fine else None
    return opponent_problem(name, spec.env_id, observation, opponents)


def _chat_problems(config: Config) -> Iterable[str]:
    """Yield problems of chat templates if the model's files are local; for others the engine checks when it starts."""
    model = Path(resolve_model(config.model_name))
    needs_one = [repr(chat.name) for chat in chats_in_use(config)]
    if not needs_one:
        return
    if config.engine.kind == "scripted":
        yield f"prompt_template {', '.join(needs_one)}: engine.kind = 'scripted' has no tokenizer and no chat template"
    elif model.is_dir() and not chat_template(model):
        yield (
            f"prompt_template {', '.join(needs_one)}: the tokenizer of {config.model_name} has no chat template; "
            "choose a template with its own markup"
        )


def _spending_problems(opponents: OpponentsConfig) -> Iterable[str]:
    if opponents.base_url is not None and (problem := url_problem(opponents.base_url)) is not None:
        yield f"opponents.base_url: {problem}"
    if opponents.max_usd and not (
        opponents.usd_per_million_prompt_tokens or opponents.usd_per_million_completion_tokens
    ):
        yield (
            "opponents.max_usd needs the prices; set opponents.usd_per_million_prompt_tokens and "
            "opponents.usd_per_million_completion_tokens"
        )
    if opponents.pause_s > opponents.max_pause_s:
        yield f"opponents.pause_s = {opponents.pause_s:g} exceeds opponents.max_pause_s = {opponents.max_pause_s:g}"


def _opponents(config: Config, spec: TrainEnvSpec | EvalEnvSpec) -> Iterable[str]:
    """Return the fixed opponents that may play in this env, without the frozen players, which play in all."""
    if spec.num_players == 1:
        return []
    if isinstance(spec, EvalEnvSpec):
        return [] if is_frozen(spec.fixed_opponent) else [spec.fixed_opponent]
    return [name for name in training_opponents(config).get(spec.env_id, ()) if not is_frozen(name)]


def _unknown(where: str, name: str, known: Iterable[str], may_be_import: bool = False) -> list[str]:
    if name in known:
        return []
    if may_be_import and ":" in name:
        module = name.partition(":")[0]
        try:
            found = importlib.util.find_spec(module)  # does not load the module, which may import torch
        except (ImportError, ValueError):
            found = None
        return [] if found else [f"{where} = {name!r}: no module {module!r} can be imported from here"]
    return [f"{where} = {name!r} is not known; {suggestion(name, known)}"]


def played_otherwise(config: Config) -> Iterator[str]:
    """Yield the differences between each eval env and the training env of the same id."""
    trained = {env.env_id: env for env in config.train_envs}
    for env in config.eval_envs:
        if (other := trained.get(env.env_id)) is None:
            continue
        owns, others = env.model_dump(), other.model_dump()
        pairs = ((key, owns[key], others[key]) for key in INHERITED)
        if differing := [f"{key} = {own!r}, trained with {its!r}" for key, own, its in pairs if own != its]:
            yield f"{env.env_id} against {env.opponent} is evaluated with {'; '.join(differing)}"


def critic_warnings(config: Config) -> Iterator[str]:
    """Yield the reward transforms that change which policy is best for an algorithm with a critic."""
    gamma = config.learner.gamma
    if not algorithm_of(config).has_critic:
        return
    way_out = "The critic already is the baseline; remove the transform (or set [])"
    if gamma < 1:
        for name in baselines(config, "final_reward_transformation"):
            yield (
                f"rewards.final_reward_transformation: with learner.gamma = {gamma:g}, {name} changes which policy is "
                f"best, because the transformed reward is discounted instead of the reward. {way_out}"
            )
    for name in baselines(config, "sampling_reward_transformation"):
        yield (
            f"rewards.sampling_reward_transformation: {name} subtracts a baseline from every turn, and "
            f"{config.algorithm} adds up the turns of a game, so their number changes which policy is best. {way_out}"
        )
