"""Observation-action pairs: the selection of a game's turns, and the file format.

Owns the filter and the JSONL. Knows nothing of tokens, templates, training or players: the same pairs fit any model and
any template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from unstable_lite.config.training import SftConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.players.factory import is_remote
from unstable_lite.plugins import suggestion
from unstable_lite.types import GameRecord

PAIRS = "pairs.jsonl"
"""File of the pairs in `sft.output`."""
SHOWN_PROBLEMS = 10


class Pair(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Turn to imitate: an observation and the answer to it."""

    observation: str = ""
    prompt: str = ""
    """Prompt of the model; if empty, the env's template makes it from the observation."""
    action: str = ""
    completion: str = ""
    """Whole answer; if empty, the action in the template's notation."""
    env_id: str = ""
    player: str = ""
    outcome: str = ""
    game: int | None = None
    turn: int | None = None


def pairs_of_game(record: GameRecord, config: SftConfig) -> tuple[list[Pair], Counter[str]]:
    """Return the pairs of a game, and the number of turns that were left out, by reason; nothing of a void game."""
    spec, pairs, left_out = record.spec, list[Pair](), Counter[str]()
    for number, turn in enumerate(record.turns if record.end != "void" else ()):
        model, outcome = spec.agent_specs[turn.pid].model, record.outcomes[turn.pid]
        name, is_served = model.name or model.uid, model.adapter_version is not None
        # A model's text stays unchanged; scripted players return only their action.
        is_scripted = not is_served and not is_remote(model)
        has_won = record.rewards[turn.pid] > 0 if spec.num_players == 1 else outcome == "win"
        limit = "max_generation_len" if is_served else "the endpoint's max_tokens"
        reasons = {
            "by a player that is not imitated": config.imitate is not None and name not in config.imitate,
            "not the winner's": "winners" in config.filter and not has_won,
            f"cut off at {limit}": turn.is_cut_off,  # training on it would teach the model to stop there
            "an empty answer": not turn.text.strip() and not (is_scripted and turn.action),
            "not valid": "valid" in config.filter and (turn.is_invalid or not turn.format_ok),
        }
        if found := [reason for reason, is_given in reasons.items() if is_given]:
            left_out[found[0]] += 1
            continue
        completion = "" if is_scripted and turn.text == turn.action else turn.text
        own: dict[str, Any] = {"player": name, "outcome": outcome, "game": spec.game_idx, "turn": number}
        pairs.append(
            Pair(observation=turn.observation, action=turn.action, completion=completion, env_id=spec.env_id, **own)
        )
    return pairs, left_out


def read_pairs(path: Path, env_ids: Collection[str]) -> list[Pair]:
    """Read a JSONL file of pairs: `observation` or `prompt`, `action` or `completion`; other fields are optional.

    env_ids: ids that a pair may name. Raises ConfigError with the number of every invalid line, or if the file has no
    pair.
    """
    pairs, problems = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            pairs += [_pair(line, env_ids)] if line.strip() else []
        except (ConfigError, ValueError, RecursionError) as error:  # of msgspec, or not UTF-8
            problems.append(f"{path}:{number}: {error}")
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"{path}: {len(problems) - SHOWN_PROBLEMS} more lines are invalid"]
    if not problems and not pairs:
        problems = [f"sft.data: there is no pair in {path}"]
    if problems:
        raise ConfigError(*problems)
    return pairs


def _pair(line: bytes, env_ids: Collection[str]) -> Pair:
    """Return the pair of a line. Raises ConfigError with the problem, msgspec.DecodeError for another form."""
    given = msgspec.json.decode(line, type=dict[str, Any])
    pair = msgspec.convert({name: value for name, value in given.items() if value is not None}, Pair)
    if pair.env_id and pair.env_id not in env_ids:
        raise ConfigError(f"no training env has the env_id {pair.env_id!r}; {suggestion(pair.env_id, env_ids)}")
    if not pair.observation and not pair.prompt:
        raise ConfigError("there is neither an 'observation' nor a 'prompt'")
    if not pair.action and not pair.completion:
        raise ConfigError("there is neither an 'action' nor a 'completion'")
    return pair
