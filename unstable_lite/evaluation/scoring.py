"""Exact probability of each legal answer, scored with the learner's model, and exact results from it.

Owns a model in this process, so it is the one module of this package that loads torch. An answer is the action inside
`\\boxed{}` and the token that ends the turn. Everything else that a model may write (an illegal move, words before the
box, other brackets) is the rest of the probability.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from unstable_lite.adapters.peft_files import CONFIG, read_json
from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec, EvalEnvSpec, TrainEnvSpec
from unstable_lite.config.training import EngineConfig, LoraConfig
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.exact import ExactResult, exact_games, exact_result, models_by_env
from unstable_lite.evaluation.models import EvaluatedModel, check_served, find_models, find_run
from unstable_lite.evaluation.plan import EvaluationPlan
from unstable_lite.evaluation.probing import (
    ActionDistribution,
    Probe,
    probe,
    random_positions,
    uniform_distribution,
    with_positions,
)
from unstable_lite.games.openspiel.game_tree import GameTree, uniform
from unstable_lite.games.openspiel.game_tree import Policy as GamePolicy
from unstable_lite.games.run_prompts import recorded_prompts
from unstable_lite.games.templates import chats_in_use, questions, templates_for
from unstable_lite.learner.answers import AnswerScores
from unstable_lite.learner.model import Policy
from unstable_lite.models import resolve_model
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.planning.plan import checked_config
from unstable_lite.planning.trust import run_config
from unstable_lite.tracking.intervals import percent

MUCH = 0.5
"""Probability of unlisted answers above which the listed ones are not representative."""


def action_distribution(
    model: str | Path,
    env_id: str,
    observations: Sequence[str],
    *,
    config: Path | Config | None = None,
    prompt_template: str | None = None,
    num_players: int = 2,
    device: str | None = None,
) -> list[ActionDistribution]:
    """Return the exact probability of each legal answer of `model` to each observation of `env_id`.

    model: `base`, an adapter's directory (a checkpoint, for example), or a run (its newest checkpoint).
    config: names base model, templates and temperature; default: that of the run that `model` is in, else the base that
    the adapter names, at temperature 1. `prompt_template`: default: the config's for `env_id`, else `default`.
    device: default: CUDA if available, else the CPU.

    Raises ConfigError for a model, config or template that cannot be used, UnsupportedEnvError for an env family whose
    legal answers cannot be listed, EnvError for an observation of another env.
    """
    (*_, found) = find_models([str(model)])
    settings = config if isinstance(config, Config) else _config(found, config, env_id)
    specs: list[EnvSpec] = [*settings.eval_envs, *settings.train_envs]
    known = [spec for spec in specs if spec.env_id == env_id]
    env = EvalEnvSpec(
        env_id=env_id,
        num_players=num_players,
        prompt_template=prompt_template or (known[0].prompt_template if known else "default"),
        action_extraction_fn=known[0].action_extraction_fn if known else "default",
    )
    return AnswerScorer(settings, [env], device, find_run([str(model)])).distributions(env, observations, found)


def probe_models(
    evaluation: EvaluationPlan, games: int, say: Callable[[str], None], device: str | None = None
) -> list[Probe]:
    """Probe the base and the adapters in each env, at the same positions, after a random legal player.

    Raises the errors of `action_distribution`.
    """
    asked = models_by_env(cell for cell in with_positions(evaluation.cells, say) if not cell.model.is_fixed)
    positions = {env: random_positions(env, games) for env in asked}
    scorer = AnswerScorer(evaluation.plan.config, list(asked), device, evaluation.run)
    probes = []
    for env, models in asked.items():
        observations = list(dict.fromkeys(position.observation for position in positions[env]))
        random_play = {observation: uniform_distribution(env.env_id, observation) for observation in observations}
        probes.append(probe("random legal", env, positions[env], random_play))
        for model in models:
            distributions = scorer.distributions(env, observations, model)
            probes.append(probe(model.name, env, positions[env], dict(zip(observations, distributions, strict=True))))
            if (rest := probes[-1].rest.value) > MUCH:
                say(
                    f"{model.name} in {env.env_id}: {percent(rest, 0)} of the probability is on answers that are not "
                    "listed. If it reasons before it answers, its choice cannot be computed exactly: sample it with "
                    "--samples"
                )
    return probes


def evaluate_exactly(
    results: list[ExactResult], evaluation: EvaluationPlan, is_forced: bool, say: Callable[[str], None]
) -> None:
    """Add exact results of `scripted:random`, the base and the adapters in each env to `results`.

    `is_forced`: whether to accept a game of any size. Raises ConfigError for a game that cannot be evaluated exactly,
    and the errors of `action_distribution`.
    """
    check_served(cell.model for cell in evaluation.cells if not cell.model.members)
    games = exact_games(evaluation, is_forced, say)
    scorer = AnswerScorer(evaluation.plan.config, list(games), run=evaluation.run)
    for env, (tree, models) in games.items():
        results.append(exact_result("random legal", env.env_id, tree, uniform(tree)))
        for model in models:
            if model.members and tree.shares_positions:
                say(f"left out: {model.name} in {env.env_id}: its positions are boards, where an average has no value")
                continue
            results.append(exact_result(model.name, env.env_id, tree, scorer.policy(env, tree, model)))
            say(f"{model.name} in {env.env_id}: exploitability {results[-1].exploitability:.4f}")


class AnswerScorer:
    """Base model with one adapter at a time."""

    def __init__(
        self, config: Config, envs: Sequence[EvalEnvSpec], device: str | None = None, run: Path | None = None
    ) -> None:
        """Load the base. run: directory of the run that prompts are as in."""
        if config.engine.top_p < 1:
            raise ConfigError(
                f"engine.top_p = {config.engine.top_p:g}: the probability of an answer is computed from the whole "
                "distribution; set it to 1"
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        # Rounding to bfloat16 changes a token's log-probability by about 0.05, and saves no time on a CPU here.
        learner = {"kernels": "torch", "activation_checkpointing": False}
        learner |= {"dtype": "float32"} if device == "cpu" else {}
        config = config.changed(eval_envs=tuple(envs), learner=learner, lora={"initial_lora_path": None})
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of names that a user cannot change
            self._policy = Policy(config, device)
        self._answers = AnswerScores(self._policy, config)
        tokenizer = Tokenizer(resolve_model(config.model_name), config.trust_remote_code)
        prompts = recorded_prompts(config, tokenizer.prompts(chats_in_use(config)), run)
        self._templates = templates_for(config, prompts)
        self._policies: dict[tuple[EnvSpec, str], GamePolicy] = {}

    def policy(self, env: EnvSpec, tree: GameTree, model: EvaluatedModel) -> GamePolicy:
        """Return the probabilities of the listed answers in each decision state; see `distributions`."""
        if model.members:
            return tree.average([self.policy(env, tree, member) for member in model.members], model.weights)
        if (key := (env, model.key)) not in self._policies:  # it may play by itself and in averages
            found = self.distributions(env, [state.observation for state in tree.states], model)
            self._policies[key] = [distribution.probabilities for distribution in found]
        return self._policies[key]

    def distributions(
        self, env: EnvSpec, observations: Sequence[str], model: EvaluatedModel
    ) -> list[ActionDistribution]:
        """Return one distribution for each observation; see `action_distribution` for the errors.

        Raises ModelError for an adapter of another shape than the config's.
        """
        check_served([model])
        if env.prompt_template not in self._templates:
            raise ConfigError(f"prompt_template {env.prompt_template!r} is not one of {', '.join(self._templates)}")
        template = self._templates[env.prompt_template]
        asked = list(questions(env, template, observations))
        if model.path is not None:
            self._policy.load_adapter(model.path)
        with self._policy.model.disable_adapter() if model.path is None else contextlib.nullcontext():
            texts = [(question.prompt, question.answers) for question in asked]
            logprobs = self._answers.score(texts, template.stop)
        return [
            ActionDistribution(actions=question.actions, probabilities=logp.exp().numpy())
            for question, logp in zip(asked, logprobs, strict=True)
        ]


def _config(model: EvaluatedModel, path: Path | None, env_id: str) -> Config:
    """Read `path`, else the config of the run that `model` is in, else make one from the adapter's own config."""
    run = find_run([str(model.path)]) if model.path is not None else None
    if path is None and run is not None:
        path = run_config(run)
    if path is not None:
        return checked_config(path)
    stored = read_json(model.path / CONFIG) if model.path is not None else {}
    base = stored.get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"{model.name}: which base model? Give config, a TOML file or a Config")
    lora = {"lora_rank": stored["r"], "lora_alpha": stored["lora_alpha"], "target_modules": stored["target_modules"]}
    env = TrainEnvSpec(env_id=env_id, num_players=1, num_actors=1)
    return Config(
        model_name=base, engine=EngineConfig(temperature=1.0), lora=LoraConfig.model_validate(lora), train_envs=(env,)
    )
