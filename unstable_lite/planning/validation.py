"""Every reason why a config cannot run: its keys, envs, opponents, model and adapter files, directories and devices.

Makes and resets each env once. Loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from unstable_lite.adapters.frozen import FrozenAdapter, find_adapter, read_facts
from unstable_lite.adapters.peft_files import check_adapter
from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.config.games import EvalEnvSpec, OpponentsConfig, TrainEnvSpec, is_policy, parse_player
from unstable_lite.engines.vllm_checks import SERVER_KIND as VLLM_SERVER
from unstable_lite.engines.vllm_checks import server_problems
from unstable_lite.errors import AdapterError, ConfigError, ModelError
from unstable_lite.games.answers import extraction_problems
from unstable_lite.games.env_catalogue import probe, trial
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.players.factory import BLIND, opponent_problem
from unstable_lite.games.templates import Template, chats_in_use, known_templates, template_problems
from unstable_lite.league.opponents import by_policy, frozen_adapters, training_opponents
from unstable_lite.learner import CRITIC_HEAD, LEARNERS
from unstable_lite.models import chat_template, resolve_model
from unstable_lite.models.files import check_chat_template, file_problems
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.planning.envs import context_problems, exact_envs, question_problems
from unstable_lite.planning.memory import shape_of
from unstable_lite.planning.placement import machine_problems, place
from unstable_lite.planning.rules import engine_rules, loss_rules, training_rules, worker_rules
from unstable_lite.plugins import suggestion

ENGINE_KINDS = ("auto", "vllm", "transformers", VLLM_SERVER, "scripted")
READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose inputs are a decoder layer's hidden states."""
WRITES_HIDDEN = ("o_proj", "down_proj")
"""Layers whose outputs are added to the hidden states."""


def find_problems(config: Config, copies: Path | None = None) -> list[str]:
    """Return every reason why a run with this config cannot start.

    copies: directory of the run's copies of frozen players, if it is the config of a run.
    """
    problems = [
        *find_worker_problems(config),
        *frozen_problems(frozen_adapters(config), config, copies),
        *_directory_problems(config),
        *training_rules(config),
        *by_policy(config, loss_rules),
    ]
    return problems or [*place(config).problems(), *context_problems(config)]


def find_worker_problems(config: Config, has_engines: bool = True) -> list[str]:
    """Return every reason why engines or learner cannot do their work, be it for a run or for `sft`."""
    config = resolve_defaults(config)
    learner, lora = config.learner, config.lora
    problems = [*find_engine_problems(config, has_learner=True), *worker_rules(config)]
    envs, reasons = exact_envs(config)
    if reasons and not envs:
        problems.append(f"run.exact_every: no env can be computed exactly: {'; '.join(reasons)}")
    for key in ("initial_lora_path", "initial_critic_path"):
        if (path := getattr(lora, key)) is not None:
            problems += adapter_problems(f"lora.{key}", path, config)
    if lora.initial_critic_path and not os.path.isfile(lora.initial_critic_path / CRITIC_HEAD):
        problems.append(f"lora.initial_critic_path: no {CRITIC_HEAD} in {lora.initial_critic_path}")
    algorithms = {f"policies.{name}.algorithm": policy.algorithm for name, policy in config.policies.items()}
    for key, algorithm in [("algorithm", config.algorithm), *algorithms.items()]:
        problems += _unknown(key, algorithm, LEARNERS, may_be_import=True) if algorithm is not None else []
    wanted = (
        ("learner.kernels = 'liger'", learner.kernels == "liger", "liger", "liger_kernel"),
        ("learner.optimizer = 'adamw8bit'", learner.optimizer == "adamw8bit", "adamw8bit", "bitsandbytes"),
        ("tracker.wandb_project", bool(config.tracker.wandb_project), "wandb", "wandb"),
    )
    for key_shown, is_wanted, extra, package in wanted:
        if is_wanted and importlib.util.find_spec(package) is None:
            problems.append(f"{key_shown}: {package} is not installed; pip install 'unstable-lite[{extra}]'")
    if problems:
        return problems
    try:
        return list(machine_problems(place(config, has_engines)))
    except ConfigError as error:
        return list(error.problems)


def find_engine_problems(config: Config, has_learner: bool = False) -> list[str]:
    """Return every reason why engines cannot play the games of the config's envs: all that an evaluation needs."""
    problems = [*_env_problems(config), *engine_rules(config), *question_problems(config)]
    problems += template_problems(config.templates)
    found: list[str] = []
    try:
        if has_learner or config.engine.kind not in ("scripted", VLLM_SERVER):
            known, specs = known_templates(config.templates), (*config.train_envs, *config.eval_envs)
            templates = (known.get(spec.prompt_template) for spec in specs)
            prompts = [made.text + "".join(made.stop) for made in templates if isinstance(made, Template)]
            found = file_problems(Path(resolve_model(config.model_name)), prompts)
        if not found:
            shape_of(config.model_name)
            found += _chat_problems(config)
    except ModelError as error:
        found.append(str(error))
    problems += found + _unknown("engine.kind", config.engine.kind, ENGINE_KINDS, may_be_import=True)
    return [*problems, *server_problems(config.engine)]


def adapter_problems(where: str, directory: Path, config: Config) -> Iterator[str]:
    """Yield each reason why the adapter in `directory` does not fit section `lora` and the base of a config."""
    try:
        stored, header = check_adapter(directory)
        problem = base_problem(read_facts(directory), config)
    except (AdapterError, ModelError) as error:
        yield f"{where}: {error}"
        return
    if not isinstance(stored.get("target_modules"), list):
        names = sorted({name.split(".")[-3] for name in header})
        yield (
            f"{where}: {directory} does not name its target_modules; set them in its adapter_config.json: "
            f"{json.dumps(names)}"
        )
        return
    if problem is not None:
        yield f"{where}: {problem}"
    lora = config.lora
    pairs = (
        ("use_rslora", bool(stored.get("use_rslora")), False),
        ("lora_rank", stored["r"], lora.lora_rank),
        ("lora_alpha", float(stored["lora_alpha"]), float(lora.lora_alpha)),
        ("target_modules", sorted(stored["target_modules"]), sorted(lora.target_modules)),
    )
    if different := [f"{key} is {value}, not {ours}" for key, value, ours in pairs if value != ours]:
        yield f"{where}: {directory} does not fit section lora: {'; '.join(different)}; set section lora to the same"


def frozen_problems(names: Iterable[str], config: Config, *copies: Path | None) -> Iterator[str]:
    """Yield each reason why the adapters of these names cannot play. `copies`: as in `find_adapter`."""
    for name in names:
        try:
            found = find_adapter(name, *copies)
        except (ConfigError, AdapterError) as error:
            yield from error.problems if isinstance(error, ConfigError) else [f"{name!r}: {error}"]
        else:
            yield from (f"{name!r}: {problem}" for problem in _misfits(found, config))


def base_problem(found: FrozenAdapter, config: Config) -> str | None:
    """Return the reason why an adapter names another base; None if it does not.

    Only names of a hub are compared, because a local directory may contain any model. Engines refuse weights that do
    not fit the base's shapes.
    """
    ours = resolve_model(config.model_name)
    if found.base and found.base != ours and not is_local(found.base) and not is_local(ours):
        return f"{found.path} is an adapter of {found.base}; here model_name is {ours}"
    return None


def is_local(name: str) -> bool:
    """Return whether a base's name is that of a path on this machine."""
    return name.startswith((".", "/", "~")) or Path(name).exists()


def _misfits(found: FrozenAdapter, config: Config) -> Iterator[str]:
    """Yield each reason why a run cannot serve an adapter, and the learner not check it."""
    lora = config.lora
    if (problem := base_problem(found, config)) is not None:
        yield problem
    elif (shape := shape_of(config.model_name)) is not None:
        # The other sizes of a layer depend on the architecture (a gated `q_proj` has twice the outputs): engines and
        # learner compare them with the base's weights.
        for layer, (inputs, outputs) in found.sizes.items():
            module = layer.rpartition(".")[2]
            hidden = inputs if module in READS_HIDDEN else outputs if module in WRITES_HIDDEN else shape.hidden
            if hidden != shape.hidden:
                yield (
                    f"{found.path} is an adapter of another base: by its {layer} the hidden size is {hidden}, that of "
                    f"{config.model_name} is {shape.hidden}"
                )
                break
    if found.rank > lora.lora_rank:
        yield (
            f"{found.path} has rank {found.rank}, but this run serves and checks adapters up to lora.lora_rank = "
            f"{lora.lora_rank}; raise it"
        )
    targets = tuple(f".{target}" for target in lora.target_modules)
    if others := {layer.rpartition(".")[2] for layer in found.sizes if not f".{layer}".endswith(targets)}:
        yield f"{found.path} adapts {', '.join(sorted(others))}; add that to lora.target_modules"


def _directory_problems(config: Config) -> Iterator[str]:
    """Yield each reason why a run directory cannot be made, or would not be found by `runs` and `top`."""
    name, output = config.run.name or "", config.run.output_dir
    if "/" in name or not name.isprintable() or name.startswith("."):
        yield (
            f"run.name = {name!r} becomes part of a directory name: it must not contain a slash or a control character "
            "or start with a dot"
        )
    try:
        parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    except OSError as error:
        yield f"run.output_dir = {str(output)[:100]!r}: {error.strerror}"
        return
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield f"run.output_dir = {output}: {parent} is not a directory that can be written to"


def _env_problems(config: Config) -> Iterator[str]:
    entries: list[tuple[str, TrainEnvSpec | EvalEnvSpec]] = [
        *((f"train_envs.{index}", spec) for index, spec in enumerate(config.train_envs)),
        *((f"eval_envs.{index}", spec) for index, spec in enumerate(config.eval_envs)),
    ]
    trained = training_opponents(config)
    for where, spec in entries:
        reason = probe(spec.env_id, spec.num_players, spec.observation, spec.env_kwargs).problem
        if (reason := reason or trial(spec).problem) is not None:
            yield f"{where}: env_id = {spec.env_id!r}: {reason}"
        if spec.reward_scale is not None and not is_openspiel(spec.env_id):
            yield f"{where}: reward_scale = {spec.reward_scale:g} is for openspiel:NAME only; leave it out"
        yield from _unknown(f"{where}: prompt_template", spec.prompt_template, known_templates(config.templates))
        yield from (f"{where}: {problem}" for problem in extraction_problems(spec.action_extraction_fn))
        opponents = (spec.fixed_opponent,) if isinstance(spec, EvalEnvSpec) else trained.get(spec.env_id, ())
        for name in opponents if spec.num_players > 1 else ():
            plays_all = parse_player(name).is_frozen or is_policy(name)
            if not plays_all and (reason := why_not_seated(name, spec, config.opponents)) is not None:
                yield f"{where}: {reason}"


def why_not_seated(name: str, spec: TrainEnvSpec | EvalEnvSpec, opponents: OpponentsConfig) -> str | None:
    """Return the reason why an opponent cannot play in an env; None if it can."""
    if spec.env_kwargs and name.startswith(BLIND):
        return f"opponent {name!r} searches the env with its default arguments, and env_kwargs sets others"
    is_fine = probe(spec.env_id, spec.num_players, spec.observation, spec.env_kwargs).problem is None
    observation = environment_of(spec, 0).observe()[1] if is_fine else None
    return opponent_problem(name, spec.env_id, observation, opponents)


def _chat_problems(config: Config) -> Iterator[str]:
    """Yield problems of chat templates if the model's files are local; for others the engine checks when it starts."""
    model = Path(resolve_model(config.model_name))
    where = f"prompt_template {', '.join(repr(chat.name) for chat in chats_in_use(config))}"
    if not chats_in_use(config):
        return
    if config.engine.kind == "scripted":
        yield f"{where}: engine.kind = 'scripted' has no tokenizer and no chat template"
    elif model.is_dir() and not chat_template(model):
        yield (
            f"{where}: the tokenizer of {config.model_name} has no chat template; choose a template with its own markup"
        )
    elif model.is_dir():
        check_chat_template(model)


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
