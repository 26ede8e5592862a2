"""Values of a run's checkpoints that are computed after the run: exact ones, and what training did to its language."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import peft
import torch
import transformers
from torch.nn import functional

from bench.harness import REPOSITORY
from bench.study.reading import AVERAGE, EXPLOITER, LANGUAGE, LANGUAGE_VALUES, STATE_DEPENDENCE
from unstable_lite.adapters.frozen import COPIES, update_of
from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec
from unstable_lite.evaluation.models import EvaluatedModel, find_models, opponent
from unstable_lite.evaluation.probing import random_positions, state_dependence
from unstable_lite.evaluation.scoring import AnswerScorer
from unstable_lite.games.openspiel.game_tree import flatten, uniform
from unstable_lite.models import resolve_model
from unstable_lite.planning.envs import exact_envs
from unstable_lite.planning.trust import CONFIG
from unstable_lite.types import BASE

EQUILIBRIUM = 1e-6
"""Exploitability below which no share of it can be computed."""
PROBED_GAMES = 200
"""Number of games of random play whose positions are probed."""
QUESTIONS = REPOSITORY / "examples" / "arithmetic.jsonl"
TEXTS, TEXT_TOKENS = 100, 128
"""Number of paragraphs of Python's reference, each of at least `LONG` characters, and most tokens of one."""
LONG = 300

Curves = dict[str, list[tuple[int, float]]]


def average_curve(directory: Path, config: Config, env_id: str) -> Curves:
    """Return the exploitability of the policy that plays as one of the kept checkpoints, drawn before each game.

    Raises UnstableError if a checkpoint cannot be read, ConfigError for a game in which histories share positions.
    """
    env, models = _exact_env(config, env_id), _checkpoints(directory)
    tree, scorer = flatten(env_id), AnswerScorer(config, config.eval_envs)
    policies = [scorer.policy(env, tree, model) for model in models.values()]
    return {f"{AVERAGE}/{env_id}": [(max(models), tree.exploitability(tree.average(policies, [1.0] * len(policies))))]}


def exploiter_curves(directory: Path, config: Config, _env_id: str) -> Curves:
    """Return the values of a run's checkpoints against its one opponent by update, in the game's utility.

    `learned` is the policy's expected utility, the mean over both seats; `exact` that of a best response, which is the
    opponent's exploitability; `missed` the share 1 - learned / exact; `untrained` that of the policy before training.

    Raises UnstableError if an adapter cannot be read, ConfigError for a game whose tree is not known.
    """
    stored = tomllib.loads((directory / CONFIG).read_text(encoding="utf-8"))
    (env,), (played,) = config.train_envs, stored["league"]["fixed_opponents"]
    tree, scorer = flatten(env.env_id), AnswerScorer(config, config.eval_envs)
    is_uniform = played == "scripted:random"
    target = uniform(tree) if is_uniform else scorer.policy(env, tree, opponent(played, directory / COPIES))
    exact = tree.exploitability(target)
    models = {0: _start(directory), **_checkpoints(directory)}
    policies = {update: scorer.policy(env, tree, model) for update, model in models.items()}
    learned = {
        update: fmean(tree.outcomes(target, seat, own).utility for seat in (0, 1)) for update, own in policies.items()
    }
    missed = {update: 1 - value / exact for update, value in learned.items()} if exact > EQUILIBRIUM else {}
    last = max(learned)
    curves = {
        "learned": learned,
        "missed": missed,
        "exact": {last: exact},
        "untrained": {last: missed[0]} if missed else {},
    }
    return {f"{EXPLOITER}/{value}": sorted(curve.items()) for value, curve in curves.items()}


def dependence_curve(directory: Path, config: Config, env_id: str) -> Curves:
    """Return how much the choice of a move depends on the state, in nats, before training and at the last checkpoint.

    See `evaluation.probing.state_dependence`. Raises UnstableError if an adapter cannot be read.
    """
    env, scorer = _exact_env(config, env_id), AnswerScorer(config, config.eval_envs)
    positions = random_positions(env, PROBED_GAMES)
    observations = list(dict.fromkeys(position.observation for position in positions))
    curve = []
    for update, model in _ends(directory):
        found = dict(zip(observations, scorer.distributions(env, observations, model), strict=True))
        at = [found[position.observation] for position in positions]
        depends = state_dependence(at, [p.turn for p in positions], [p.game for p in positions])
        curve.append((update, depends.value))
    return {f"{STATE_DEPENDENCE}/{env_id}": curve}


def language_curves(directory: Path, config: Config, _env_id: str) -> Curves:
    """Return what training did to the model's language, in nats, before it and at the last checkpoint.

    `answers`: mean log-probability of the right answer to `QUESTIONS`, with the end of its line; `of_base`: that of the
    base, for comparison. `kl`: mean KL(policy ‖ base) of the next token in `TEXTS` paragraphs that are not games.
    """
    place, curves = resolve_model(config.model_name), Curves()
    of_base, _ = _language(place, None)
    for update, model in _ends(directory):
        for value, number in zip(LANGUAGE_VALUES, (*_language(place, model.path), of_base), strict=True):
            curves.setdefault(f"{LANGUAGE}/{value}", []).append((update, number))
    return curves


COMPUTED: dict[str, Callable[[Path, Config, str], Curves]] = {
    AVERAGE: average_curve,
    EXPLOITER: exploiter_curves,
    LANGUAGE: language_curves,
    STATE_DEPENDENCE: dependence_curve,
}
"""Functions that return the curves of a kind of measure, by the kind."""


@cache  # the runs of a study have one base, and often one start
@torch.inference_mode()
def _language(place: str, adapter: Path | None) -> tuple[float, float]:
    """Return `answers` and `kl` of `language_curves` for an adapter, or for the base itself."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    model = base if adapter is None else peft.PeftModel.from_pretrained(base, adapter)

    def next_logp_TV(ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)

    answers, divergences = list[float](), list[float]()
    for asked in map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines()):
        prompt, answer = encode(f"Question: {asked['question']}\nAnswer:"), encode(f" {asked['answer']}\n")
        answer_logp_TV = next_logp_TV(prompt + answer)[len(prompt) - 1 : -1]
        answers.append(float(answer_logp_TV[range(len(answer)), answer].sum()))
    if adapter is None:
        return fmean(answers), 0.0
    parts = (part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) >= LONG)
    for ids in (encode(part)[:TEXT_TOKENS] for part in islice(dict.fromkeys(parts), TEXTS)):
        logp_TV = next_logp_TV(ids)
        with model.disable_adapter():
            base_logp_TV = next_logp_TV(ids)
        divergences.append(float(functional.kl_div(base_logp_TV, logp_TV, reduction="batchmean", log_target=True)))
    return fmean(answers), fmean(divergences)


def _exact_env(config: Config, env_id: str) -> EnvSpec:
    (env,) = (env for env in exact_envs(config)[0] if env.env_id == env_id)
    return env


def _start(directory: Path) -> EvaluatedModel:
    """Return the model that a run began with."""
    start = tomllib.loads((directory / CONFIG).read_text(encoding="utf-8"))["lora"].get("initial_lora_path")
    return opponent(BASE if start is None else f"adapter:{start}")


def _checkpoints(directory: Path) -> dict[int, EvaluatedModel]:
    """Return a run's checkpoints by update; if several policies learn, those of `main`."""
    named = ((model.name.partition("/"), model) for model in find_models([str(directory)]))
    found = ((update_of(Path(name)), model) for (name, _, policy), model in named if policy in ("", "main"))
    return {update: model for update, model in found if update is not None}  # the base has none


def _ends(directory: Path) -> Iterator[tuple[int, EvaluatedModel]]:
    """Yield the model before training, and the last checkpoint, with their updates."""
    yield 0, _start(directory)
    yield max(_checkpoints(directory).items())
