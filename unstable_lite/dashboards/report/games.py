"""Read the games of a run: an even sample of transcripts, with the trained data of each turn, and all outcomes.

This takes one pass over the records; a sample that grows too large is halved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import tokenizers

from unstable_lite.dashboards.report.tokens import pieces
from unstable_lite.files import read_part, read_records
from unstable_lite.games.templates import Template
from unstable_lite.games.thinking import END_OF_THINKING
from unstable_lite.league.ratings import mean_ranks
from unstable_lite.tracking.train_data import train_files

MAX_CHARS = 64_000_000
"""Most characters of the texts in one kind's sample; compressed, transcripts take a tenth to a fiftieth of that."""

Pair = tuple[str, str]


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
    kept: list[dict[str, Any]]
    """Games of the samples by number. A turn is a table: see `_turn`."""
    results: dict[Pair, Counter[str]]
    """Outcomes of the first model of each pair in its games against the second."""
    outcomes: dict[str, Counter[str]]
    """Outcomes of games against other models, by model."""
    ends: Counter[str]
    tokenizer_found: bool

    @property
    def num_read(self) -> int:
        return sum(sample.seen for sample in self.samples.values())


def read_games(
    run: Path,
    tokenizer: tokenizers.Tokenizer | None,
    max_games: int,
    templates: Mapping[tuple[str, str], Template] | None = None,
) -> RunGames:
    """Read the games. templates: those of turns that were not trained on, by kind of game and env id."""
    samples = {kind: Sample(max_games) for kind in ("train", "eval", "void")}
    results: dict[Pair, Counter[str]] = defaultdict(Counter)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    ends: Counter[str] = Counter()
    for game in read_records(run / "games.jsonl"):
        ends[game["end"]] += 1
        if game["end"] == "void":
            samples["void"].add(game)
        else:
            samples[game["kind"]].add(game)
            if "branch_turn" not in game:  # others played its first turns
                _count_results(game, results)
                _count_outcomes(game, outcomes)
    kept = sorted((game for sample in samples.values() for game in sample.games), key=lambda game: game["game_idx"])
    trained = _trained_turns(run, {game["game_idx"] for game in kept if game["kind"] == "train"})
    for game in kept:
        template = (templates or {}).get((game["kind"], game["env_id"]))
        served = {agent["pid"] for agent in game["agents"] if not agent["model"].startswith("fixed-")}
        game["turns"] = [
            _turn(turn, trained.get((game["game_idx"], turn[0], index)), tokenizer)
            | _prompt(turn, template if turn[0] in served else None, len(game["agents"]))
            | ({"adapter": game["adapter_versions"][index]} if "adapter_versions" in game else {})
            for index, turn in enumerate(game["turns"])
        ]
    return RunGames(
        samples=samples,
        kept=kept,
        results=dict(results),
        outcomes=dict(outcomes),
        ends=ends,
        tokenizer_found=tokenizer is not None,
    )


def _chars(game: Mapping[str, Any]) -> int:
    return sum(len(turn[1]) + len(turn[2]) for turn in game["turns"])


def policy_seats(game: Mapping[str, Any]) -> list[int]:
    """Return the seats of the model that was trained or evaluated."""
    if game["kind"] == "train":
        return [agent["pid"] for agent in game["agents"] if agent["collect_data"]]
    return [agent["pid"] for agent in game["agents"] if "opponent" not in agent]


def _count_results(game: Mapping[str, Any], results: dict[Pair, Counter[str]]) -> None:
    """Count one result of each model against each other one; as in ratings, the better mean rank of the seats wins."""
    uids = {agent["pid"]: agent["model"] for agent in game["agents"]}
    places = mean_ranks(uids, {pid: game["rewards"][str(pid)] for pid in uids})
    for model, other in permutations(places, 2):
        behind = places[model] - places[other]
        results[model, other]["draw" if behind == 0 else "loss" if behind > 0 else "win"] += 1


def _count_outcomes(game: Mapping[str, Any], outcomes: dict[str, Counter[str]]) -> None:
    """Count one outcome for each model, that of its best seat, as in evaluations.

    A model that shares the top only with itself has won.
    """
    seats: dict[str, set[str]] = defaultdict(set)
    for agent in game["agents"]:
        seats[agent["model"]].add(game["outcomes"][str(agent["pid"])])
    if len(seats) == 1:
        return
    at_top = [model for model, had in seats.items() if had != {"loss"}]
    for model, had in seats.items():
        is_won = "win" in had or at_top == [model]
        outcomes[model]["win" if is_won else "draw" if model in at_top else "loss"] += 1


def _trained_turns(run: Path, games: set[int]) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Return the data in batches and the number of the update, by game, player and turn."""
    trained = {}
    for update, path in train_files(run).items():
        for row in read_part(path):
            info = row["step_info"]
            if info.get("game_idx") in games:
                trained[info["game_idx"], row["pid"], info["turn"]] = row | {"update": update}
    return trained


def _turn(turn: list[Any], trained: Mapping[str, Any] | None, tokenizer: tokenizers.Tokenizer | None) -> dict[str, Any]:
    """Return `obs`, `text`, `action` …, `trained` if a batch had the turn, and `tokens` if the run kept them."""
    made = dict(zip(("pid", "obs", "text", "action", "format_ok", "seconds", "tokens"), turn, strict=False))
    if trained is not None:
        info = trained["step_info"]
        made["trained"] = {
            "update": trained["update"],
            "staleness": trained["staleness"],
            "finish_reason": trained["finish_reason"],
            "rewards": [info.get(stage) for stage in ("raw_reward", "env_reward", "step_reward")] + [trained["reward"]],
            "prompt": _around(trained["obs"], made["obs"]),
            "learner_logprobs": trained.get("learner_logprobs"),
        }
    if sampled := made.get("tokens"):
        text = made["text"].replace(END_OF_THINKING, "", 1) if "forced" in sampled else made["text"]
        made["tokens"] = sampled | {"pieces": pieces(sampled["completion_ids"], text, tokenizer)}
    return made


def _prompt(turn: Sequence[Any], template: Template | None, num_players: int) -> dict[str, Any]:
    """Return `prompt` as the template makes it, regardless of the special tokens of the run's model."""
    return {} if template is None else {"prompt": _around(template.prompt(turn[1], num_players), turn[1])}


def _around(prompt: str, observation: str) -> list[str]:
    """Return the prompt's parts before and after the observation, or the whole prompt if it does not contain that."""
    before, found, after = prompt.partition(observation)
    return [before, after] if found else [prompt]
