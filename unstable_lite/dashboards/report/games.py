"""Read the games of a run: an even sample of transcripts, with the trained data of each turn, and all ends.

This takes one pass over the records; a sample that grows too large is halved. A run keeps neither the prompts of turns
that were not trained on, which its config gives, nor the texts of tokens, which its tokenizer gives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from pydantic import ValidationError

from unstable_lite.config.games import TemplateConfig
from unstable_lite.files import read_part, read_records
from unstable_lite.games.answers import KNOWN_TAGS
from unstable_lite.games.templates import Template, known_templates
from unstable_lite.models.local_tokenizer import CUT, IncrementalDetokenizer
from unstable_lite.tracking.records import train_files
from unstable_lite.types import policy_of

MAX_CHARS = 64_000_000
"""Most characters of the texts in one kind's sample; compressed, transcripts take a tenth to a fiftieth of that."""


@dataclass(slots=True)
class Sample:
    """Sample of every `stride`-th game, at most `max_games` with at most `MAX_CHARS` of text."""

    max_games: int
    stride: int = 1
    seen: int = 0
    games: list[dict[str, Any]] = field(default_factory=list)
    _chars: int = 0

    def add(self, game: dict[str, Any]) -> None:
        if self.seen % self.stride == 0:
            self.games.append(game)
            self._chars += _chars(game)
        self.seen += 1
        while len(self.games) > 1 and (len(self.games) > self.max_games or self._chars > MAX_CHARS):
            self.games = self.games[::2]
            self._chars = sum(map(_chars, self.games))
            self.stride *= 2


@dataclass(slots=True, kw_only=True)
class RunGames:
    samples: dict[str, Sample]
    """Samples by kind: "train", "eval", "void"."""
    tokenizer_found: bool
    kept: list[dict[str, Any]] = field(default_factory=list)
    """Games of the samples by number. A turn is a table: see `_turn`."""
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def num_read(self) -> int:
        return sum(sample.seen for sample in self.samples.values())


def read_games(
    run: Path, tokenizer: tokenizers.Tokenizer | None, max_games: int, config: Mapping[str, Any] | None = None
) -> RunGames:
    """Read the games. config: the run's config.toml, for prompts of turns that were not trained on, and thoughts."""
    samples = {kind: Sample(max_games) for kind in ("train", "eval", "void")}
    games = RunGames(samples=samples, tokenizer_found=tokenizer is not None)
    for game in read_records(run / "games.jsonl"):
        games.ends[game["end"]] += 1
        samples["void" if game["end"] == "void" else game["kind"]].add(game)
    games.kept = sorted((game for of in samples.values() for game in of.games), key=lambda game: game["game_idx"])
    kept_trained = {game["game_idx"] for game in games.kept if game["kind"] == "train"}
    trained = {}  # data in batches and the number of the update, by game, player and turn
    for update, path in train_files(run).items():
        for row in read_part(path):
            info = row["step_info"]
            if info.get("game_idx") in kept_trained:
                trained[info["game_idx"], row["pid"], info["turn"]] = row | {"update": update}
    templates, own = templates_by_env(config or {}), _own_templates(config or {}).values()
    closes = [tags[1] for tags in (*(made.think for made in own if made.think is not None), *KNOWN_TAGS)]
    for game in games.kept:
        template = templates.get((game["kind"], game["env_id"]))
        served = {agent["pid"] for agent in game["agents"] if not agent["model"].startswith("fixed-")}
        for index, turn in enumerate(game["turns"]):
            of_batch = trained.get((game["game_idx"], turn[0], index))
            made = game["turns"][index] = _turn(turn, of_batch, tokenizer, closes)
            if template is not None and of_batch is None and made["pid"] in served:
                # Regardless of the special tokens of the run's model.
                made["prompt"] = _around(template.prompt(made["obs"], len(game["agents"])), made["obs"])
            if "adapter_versions" in game:
                made["adapter"] = game["adapter_versions"][index]
    return games


def _chars(game: Mapping[str, Any]) -> int:
    return sum(len(turn[1]) + len(turn[2]) for turn in game["turns"])


def policy_seats(game: Mapping[str, Any]) -> list[int]:
    """Return the seats of the model that was trained or evaluated, the first if two policies are trained."""
    if game["kind"] == "train":
        trained = [(agent["pid"], policy_of(agent["model"])) for agent in game["agents"] if agent["collect_data"]]
        return [pid for pid, policy in trained if policy == trained[0][1]]
    return [agent["pid"] for agent in game["agents"] if "opponent" not in agent]


def _turn(
    turn: list[Any], trained: Mapping[str, Any] | None, tokenizer: tokenizers.Tokenizer | None, closes: Sequence[str]
) -> dict[str, Any]:
    """Return `obs`, `text`, `action` …, `trained` if a batch had the turn, and `tokens` if the run kept them.

    `close` is the one of `closes` that ends the last thought.
    """
    made = dict(zip(("pid", "obs", "text", "action", "format_ok", "seconds", "tokens"), turn, strict=False))
    if found := [close for close in closes if close in made["text"]]:
        made["close"] = max(found, key=made["text"].rfind)
    if trained is not None:
        info, made["prompt"] = trained["step_info"], _around(trained["obs"], made["obs"])
        made["trained"] = {
            "update": trained["update"],
            "staleness": trained["staleness"],
            "rewards": [info.get("env_reward"), info.get("step_reward"), trained["reward"]],
            "learner_logprobs": trained.get("learner_logprobs"),
        }
    if sampled := made.get("tokens"):
        text = made["text"]
        if tokenizer is not None and "forced" in sampled:
            text = text.replace(tokenizer.decode(sampled["forced"]["ids"], skip_special_tokens=False), "", 1)
        made["tokens"] = sampled | {"pieces": pieces(sampled["completion_ids"], text, tokenizer)}
    return made


def _around(prompt: str, observation: str) -> list[str]:
    """Return the prompt's parts before and after the observation, or the whole prompt if it does not contain that."""
    before, found, after = prompt.partition(observation)
    return [before, after] if found else [prompt]


def templates_by_env(config: Mapping[str, Any]) -> dict[tuple[str, str], Template]:
    """Return the templates by kind of game and env id. `config`: a run's config.toml.

    Chat templates, which a tokenizer lays out, are left out, and so are envs with several templates.
    """
    known, names = known_templates(_own_templates(config)), defaultdict(set)
    for kind in ("train", "eval"):
        for env in config.get(f"{kind}_envs", ()):
            names[kind, env["env_id"]].add(env.get("prompt_template", "default"))
    found = {key: known.get(one) for key, (one, *others) in names.items() if not others}
    return {key: template for key, template in found.items() if isinstance(template, Template)}


def _own_templates(config: Mapping[str, Any]) -> dict[str, TemplateConfig]:
    try:
        return {name: TemplateConfig.model_validate(made) for name, made in config.get("templates", {}).items()}
    except ValidationError:  # of another version
        return {}


def pieces(ids: Sequence[int], text: str, tokenizer: tokenizers.Tokenizer | None) -> list[tuple[str, int]] | None:
    """Return the text of `ids` in order, in pieces with their numbers of tokens; special tokens are visible.

    Tokens that are parts of one character form one piece. None without a tokenizer, or if the tokens do not give
    `text`, because the tokenizer is then not the run's.
    """
    if tokenizer is None:
        return None
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special:  # tags of thoughts are in the text even if they are special
            whole, text = whole.replace(token.content, ""), text.replace(token.content, "")
    if not whole.startswith(text.rstrip(CUT)):
        return None
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    made: list[tuple[str, int]] = []
    waiting = 0
    for token_id in ids:
        waiting += 1
        if piece := stream.step(token_id):
            made.append((piece, waiting))
            waiting = 0
    if waiting:  # the completion ends within a character
        made.append((CUT, waiting))
    return made
