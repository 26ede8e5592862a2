"""Facts about a config's envs for `check`: faults, isolation, exact evaluation, questions, lengths of prompts.

Makes each env at most once, and plays trial games of random moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.config.env_ids import content_file, is_openspiel, slug
from unstable_lite.config.games import INHERITED, EnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.games.answers import THINK, find_tags, leaves_thinking_open, written_answer
from unstable_lite.games.env_catalogue import depends_on_hash_seed, env_family, is_isolated, probe, remark_on, trial
from unstable_lite.games.openspiel.game import information_fault, trial_problem
from unstable_lite.games.openspiel.game_tree import flatten, uniform
from unstable_lite.games.questions import Questions, read_questions
from unstable_lite.games.run_prompts import prompt_warnings
from unstable_lite.games.templates import (
    ChatTemplate,
    Template,
    allowance_problem,
    check_read,
    known_templates,
    templates_in_use,
)
from unstable_lite.models import added_tokens, chat_template, resolve_model
from unstable_lite.models.local_tokenizer import find_tokenizer
from unstable_lite.planning.memory import shape_of

OPERATIONS_PER_S = {True: 3e13, False: 1e10}
"""Arithmetic operations a second that a forward pass is assumed to make, on a GPU or not."""
CHARS_PER_TOKEN = 3


def describe_envs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield rows on faulty games, isolation, rewards that no trial game showed, questions and exact evaluations."""
    specs = {spec.env_id: spec for spec in (*config.train_envs, *config.eval_envs)}
    for family in dict.fromkeys(map(env_family, specs)):
        fault = information_fault(family) if is_openspiel(family) else remark_on(family)
        if fault:
            yield "warning", f"{family}: {fault}"
    if isolated := dict.fromkeys(env.env_id for env in (*config.train_envs, *config.eval_envs) if is_isolated(env)):
        yield "isolated", f"{', '.join(isolated)}: in processes that can be killed"
    for env_id, spec in specs.items():
        if not probe(env_id, spec.num_players, spec.observation, spec.env_kwargs).is_repeatable:
            cause = "by a clock, a random source of its own or something that a game leaves behind"
            text = f"two games with the same seed began differently ({cause}), so no run repeats its games"
            yield "warning", f"{env_id}: {text}"
        elif depends_on_hash_seed(env_id, spec.num_players, spec.env_kwargs):
            cost = "so it is isolated with a fixed one: a turn takes about 0.1 ms longer, and a process about 55 MB"
            why = cost if env_id in isolated else "so no run repeats its games: remove isolated = false"
            kind = "hash seed" if env_id in isolated else "warning"
            yield kind, f"{env_id}: its games depend on the hash seed, {why}"
        if (unseen := trial(spec).unseen) is not None:
            yield "rewards not seen", f"{env_id}: {unseen}"
    for env_id, questions in question_files(config).items():
        total, games = len(questions.items), config.run.eval_games
        asked = f"; {games} games of an evaluation ask " + ("all" if games >= total else f"the first {games}")
        is_asked = games and any(env.env_id == env_id for env in config.eval_envs)
        yield "questions", f"{total} in {content_file(env_id)}" + asked * bool(is_asked)


def played_otherwise(config: Config) -> Iterator[str]:
    """Yield the differences between each eval env and the training env of the same id."""
    trained = {env.env_id: env.model_dump() for env in config.train_envs}
    for env in config.eval_envs:
        owns, others = env.model_dump(), trained.get(env.env_id, {})
        if differing := [key for key in INHERITED if others and owns[key] != others[key]]:
            shown = "; ".join(f"{key} = {owns[key]!r}, trained with {others[key]!r}" for key in differing)
            yield f"{env.env_id} against {env.opponent} is evaluated with {shown}"


def question_files(config: Config) -> dict[str, Questions]:
    """Return each file of questions, by env id. Raises ConfigError for a file that cannot be used."""
    env_ids = dict.fromkeys(spec.env_id for spec in (*config.train_envs, *config.eval_envs))
    return {env_id: read_questions(env_id) for env_id in filter(content_file, env_ids)}


def question_problems(config: Config) -> Iterator[str]:
    """Yield each pair of files of questions that metrics could not distinguish."""
    first: dict[str, str] = {}
    for spec in (*config.train_envs, *config.eval_envs):
        name = slug(spec.env_id)
        if content_file(spec.env_id) and (other := first.setdefault(name, spec.env_id)) != spec.env_id:
            yield f"{other} and {spec.env_id} have one name in metrics, {name}; rename one of the files"


def changed_questions(config: Config, recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each file whose SHA-256 is not the recorded one. `recorded`: by env id."""
    try:
        files = question_files(config)
    except ConfigError:  # reported with the other problems of the config
        return
    for env_id, questions in files.items():
        if recorded.get(env_id, questions.sha256) != questions.sha256:
            yield (
                f"{content_file(env_id)} changed since the run began: its SHA-256 is {questions.sha256[:16]}…, and "
                f"the run recorded {recorded[env_id][:16]}…. Restore the file, or start a new run"
            )


def exact_envs(config: Config) -> tuple[list[EnvSpec], list[str]]:
    """Return the envs that `run.exact_every` computes, each id once, and the reasons why it computes no others."""
    if config.run.exact_every is None:
        return [], []
    specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
    envs, reasons = [], []
    for spec in {spec.env_id: spec for spec in reversed(specs)}.values():
        reason = allowance_problem(spec) or _game_problem(spec.env_id, spec.num_players)
        if reason is None and config.run.exact_samples is None:
            try:
                check_read(spec, "[x]", written_answer("", "[x]"))
            except ConfigError as error:
                reason = f"{spec.env_id}: {error}"
        if reason is None:
            envs.append(spec)
        else:
            reasons.append(reason)
    return envs[::-1], reasons[::-1]


def describe_exact(config: Config, is_on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Yield a row with size, time and number of the exact evaluations of each env, and a row for each one without."""
    run, shape = config.run, shape_of(config.model_name)
    envs, reasons = exact_envs(config)
    for env in envs:
        tree, count = flatten(env.env_id), 1 + run.learning_steps // (run.exact_every or 1)
        if run.exact_samples is not None:
            asked = len(tree.states) * run.exact_samples
            size = f"{len(tree.states):,} decision states × {run.exact_samples} answers"
            most = f"at most {asked * config.engine.max_generation_len:,} tokens"
            yield "sampled exploitability", f"{env.env_id}: {size} = {asked:,}, {most}, × {count}"
            continue
        started = time.monotonic()
        tree.exploitability(uniform(tree))
        # Both best responses are computed twice: with other answers, and renormalised.
        seconds = 2 * (time.monotonic() - started)
        if shape is not None:
            tokens = sum(len(state.observation) for state in tree.states) / CHARS_PER_TOKEN
            seconds += 2 * shape.base_parameters * tokens / OPERATIONS_PER_S[is_on_gpu]
        size = f"{len(tree.states):,} decision states, {tree.num_answers:,} answers"
        yield "exact evaluation", f"{env.env_id}: {size}; about {seconds:.2g} s × {count} (estimated)"
    yield from (("not exact", reason) for reason in reasons)


@cache
def _game_problem(env_id: str, num_players: int) -> str | None:
    """Return the reason why a game cannot be computed; None if it can. It may take seconds to count a large game."""
    # A trial first, because OpenSpiel may crash the process.
    if is_openspiel(env_id) and (reason := trial_problem(env_id, num_players)) is not None:
        return f"{env_id}: {reason}"
    try:
        flatten(env_id)
    except ConfigError as error:
        return str(error)
    return None


def context_problems(config: Config) -> Iterator[str]:
    """Yield each env whose first prompt does not fit the context, if a trial game shows it."""
    limit = config.engine.max_model_len
    for env_id, (first, *_) in _trial_prompts(config):
        if first >= limit:
            yield (
                f"{env_id}: the first prompt of a game has {first} tokens, and engine.max_model_len = {limit} must "
                "hold it and an answer; raise that key, or set another observation"
            )


def context_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each env of which a prompt of a trial game fills half of the context."""
    limit = config.engine.max_model_len
    for env_id, (first, *later) in _trial_prompts(config):
        last, turn = (later or [first])[-1], len(later)
        if last >= limit / 2:
            turns = turn * (limit - first) / (last - first) if last > first else math.inf
            full = f"at turn {math.ceil(turns)} at this pace" if turns < math.inf else "later"
            yield (
                f"{env_id}: turn {turn} of a trial game has a prompt of {last} tokens, and the context "
                f"(engine.max_model_len = {limit}), which cuts a game off, is full {full}. Illegal answers and long "
                "actions come on top"
            )


def _trial_prompts(config: Config) -> Iterator[tuple[str, list[int]]]:
    """Yield env ids with the numbers of tokens of a trial game's prompts, if these may fill half of the context."""
    trained, known = [spec.env_id for spec in config.train_envs], known_templates(config.templates)
    for spec in (*config.train_envs, *(spec for spec in config.eval_envs if spec.env_id not in trained)):
        template = known[spec.prompt_template]
        if isinstance(template, ChatTemplate):  # without the tokenizer's markup
            template = Template(template.name, template.system + template.user + template.assistant)
        texts = [template.prompt(seen, spec.num_players) for seen in trial(spec).observations]
        lengths = [len(text.encode("utf-8", "replace")) for text in texts]
        # A token has at least one byte, and reading a large tokenizer takes a second.
        if max(lengths, default=0) < config.engine.max_model_len / 2:
            continue
        tokenizer = find_tokenizer(config.model_name)
        if config.engine.kind == "scripted":  # there a token is a byte
            yield spec.env_id, lengths
        elif tokenizer is not None:
            yield spec.env_id, [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts)]


def thinking_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each template in use that does not open thinking, if there is a budget for it.

    config: one without problems.
    """
    if config.engine.thinking_tokens is None:
        return
    model = Path(resolve_model(config.model_name))
    # The template of a model from a hub is not here yet.
    of_model = chat_template(model) if model.is_dir() else None
    for template in templates_in_use(config):
        if isinstance(template, ChatTemplate):
            tags = template.tags or find_tags(of_model or "", added_tokens(model)) or THINK
            opens = leaves_thinking_open(template.assistant, tags) or (
                template.thinking and (of_model is None or tags[0] in of_model)
            )
        else:
            tags, opens = template.tags, bool(template.opened_thinking)
        if not opens:
            yield (
                f"engine.thinking_tokens = {config.engine.thinking_tokens}: prompt_template {template.name!r} does not "
                f"open {tags[0]}, so the budget ends only a thinking that the model opens by itself"
            )


def template_warnings(config: Config) -> Iterator[str]:
    """Yield `prompt_warnings` if the model's files are local; for others a run has them at its start."""
    model = Path(resolve_model(config.model_name))
    if config.engine.kind != "scripted" and (tokens := added_tokens(model)):
        yield from prompt_warnings(config, {"special_tokens": tokens, "chat_template": chat_template(model)})
