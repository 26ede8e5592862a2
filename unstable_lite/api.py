"""`build()`: make a run from keyword arguments with the reference's names (`runtime.py` `build`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec
from unstable_lite.config.reading import parse_config
from unstable_lite.errors import ConfigError
from unstable_lite.league.samplers import MODEL_SAMPLERS, BaseModelSampler
from unstable_lite.orchestrator.run import Run
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.validation import find_problems

_VLLM_KEYS = {"max_tokens": "max_generation_len"} | {
    key: key for key in ("max_model_len", "max_parallel_seq", "max_loras", "temperature", "top_p")
}
"""Keys of the reference's `vllm_config`, and the matching keys of our section `engine`."""


def build(
    *,
    model_name: str = "builtin:tiny",
    train_envs: Sequence[TrainEnvSpec],
    eval_envs: Sequence[EvalEnvSpec] | None = None,
    env_sampling_strategy: str | Mapping[str, Mapping[str, Any]] = "random",
    opponent_sampling_strategy: str | Mapping[str, Any] = "none",
    fixed_opponents: Sequence[str] = ("google/gemini-2.0-flash-lite-001",),
    algorithm: str | type = "reinforce",
    max_train_len: int | None = None,
    max_generation_len: int = 4096,
    batch_size: int = 384,
    mini_batch_size: int | None = None,
    learning_rate: float = 1e-5,
    gradient_clipping: float = 0.2,
    activation_checkpointing: bool | Literal["auto"] = "auto",
    gradient_checkpointing: bool = True,
    use_trainer_cache: bool = False,  # noqa: ARG001
    buffer_size: int | None = None,
    lora_config: Mapping[str, Any] | None = None,
    vllm_config: Mapping[str, Any] | None = None,
    wandb_project: str | None = None,
    **sections: Mapping[str, Any],
) -> Run:
    """Make a run that is ready to `start()`.

    Settings that have no keyword in the reference are given as sections of the config (docs/config.md):
    `engine={"kind": "vllm"}`. `gradient_checkpointing` is another name for `activation_checkpointing`, and
    `use_trainer_cache`, which only cost memory, is ignored. Raises ConfigError with every problem at once.
    """
    given = vllm_config or {}
    unknown = sorted(set(given) - set(_VLLM_KEYS))
    raw: dict[str, Any] = {
        "model_name": model_name,
        "algorithm": algorithm,
        "train_envs": tuple(train_envs),
        "eval_envs": tuple(eval_envs or ()),
        "engine": {"max_generation_len": max_generation_len}
        | {_VLLM_KEYS[key]: value for key, value in given.items() if key in _VLLM_KEYS},
        "learner": {
            "max_train_len": max_train_len,
            "batch_size": batch_size,
            "mini_batch_size": mini_batch_size,
            "learning_rate": learning_rate,
            "gradient_clipping": gradient_clipping,
            "activation_checkpointing": gradient_checkpointing and activation_checkpointing,
        },
        "league": {
            "env_sampling_strategy": env_sampling_strategy,
            "opponent_sampling_strategy": opponent_sampling_strategy,
            "fixed_opponents": tuple(fixed_opponents),
        },
        "lora": dict(lora_config or {}),
        "buffer": {"buffer_size": buffer_size},
        "tracker": {"wandb_project": wandb_project},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, Mapping) else section
    config, problems = parse_config(raw)
    problems = [f"unknown key 'vllm_config.{key}'; known: {', '.join(_VLLM_KEYS)}" for key in unknown] + problems
    if problems or config is None:
        raise ConfigError(*problems, *(find_problems(config) if config is not None else ()))
    return Run(make_plan(config))


def build_script(learner: Mapping[str, Any]) -> Run:
    """Make the run of the reference's script, given its learner's arguments. Raises ConfigError as `build` does."""
    own = {"options": {}, **learner}
    buffer, registry, options = own.pop("buffer"), own.pop("model_registry"), dict(own.pop("options"))
    tracker = own.pop("tracker").given
    collector = tracker.get("collector")
    if collector is None or collector["buffer"] is not buffer or collector["game_scheduler"].registry is not registry:
        raise ConfigError("learner.train: no collector of its tracker, buffer and registry: call `collect` before")
    (model_sampler, env_sampler), engine = collector["game_scheduler"].samplers, collector["vllm_config"].items()
    strategies = {sampler: name for name, sampler in MODEL_SAMPLERS.items()} | {BaseModelSampler: "none"}
    options.pop("infer_mini_batch_size", None)  # a constant here, which changes no result
    in_section = {"critic_learning_rate", "normalize_adv"} & options.keys()
    run = build(
        train_envs=env_sampler.train_env_specs,
        eval_envs=env_sampler.eval_env_specs,
        opponent_sampling_strategy=strategies.get(type(model_sampler), "random"),
        fixed_opponents=[meta.name for meta in registry.get_all_models().values() if meta.kind == "fixed"],
        gradient_clipping=own.pop("grad_clip"),
        buffer_size=buffer.max_buffer_size,
        lora_config={**own.pop("lora_cfg"), "initial_lora_path": own.pop("initial_lora_path")},
        vllm_config={key: value for key, value in engine if key not in ("model_name", "lora_config")},
        wandb_project=tracker["wandb_project"],
        run={"name": tracker["run_name"], **collector["workers"]},
        learner={key: options.pop(key) for key in in_section},
        **own,
        **options,
    )
    return Run(run.plan, scheduler=collector["game_scheduler"], buffer=buffer)
