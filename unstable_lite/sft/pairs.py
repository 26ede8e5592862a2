"""Observation-action pairs: the selection of a game's turns, and the file format.

Owns the filter and the JSONL. Knows nothing of tokens, templates, training or players: the same pairs fit any model and
any template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from unstable_lite.config.games import TrainEnvSpec
from unstable_lite.config.training import SftConfig
from unstable_lite.errors import ConfigError
from unstable_lite.files import to_line
from unstable_lite.games.players.factory import is_remote
from unstable_lite.plugins import suggestion
from unstable_lite.types import GameRecord

PAIRS = "pairs.jsonl"
"""File of the pairs in `sft.output`."""
SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Turn to imitate: an observation and the answer to it."""

    observation: str = ""
    """Observation of the env."""
    prompt: str = ""
    """Prompt of the model; if empty, the env's template makes it from the observation."""
    action: str = ""
    """Action for the env."""
    completion: str = ""
    """Whole answer; if empty, the action in the template's notation."""
    env_id: str = ""
    player: str = ""
    outcome: str = ""
    game: int = 0
    turn: int = 0


def pairs_of_game(record: GameRecord, config: SftConfig) -> tuple[list[Pair], Counter[str]]:
    """Return the pairs of a finished game, and the number of turns that were left out, by reason."""
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for number, turn in enumerate(record.turns):
        agent = record.spec.agent_specs[turn.pid]
        assert agent.pid == turn.pid
        # A model's text stays unchanged; scripted players return only their action.
        is_scripted = agent.model.kind == "fixed" and not is_remote(agent.model)
        is_alone = record.spec.num_players == 1
        has_won = record.rewards[turn.pid] > 0 if is_alone else record.outcomes[turn.pid] == "win"
        if config.imitate is not None and agent.model.uid not in config.imitate:
            left_out["by a player that is not imitated"] += 1
        elif "winners" in config.filter and not has_won:
            left_out["not the winner's"] += 1
        elif turn.is_cut_off:  # training on it would teach the model to stop there
            is_ours = agent.model.kind == "checkpoint"
            left_out["cut off at max_generation_len" if is_ours else "cut off at the endpoint's max_tokens"] += 1
        elif not turn.text.strip() and not (is_scripted and turn.action):
            left_out["an empty answer"] += 1
        elif "valid" in config.filter and (turn.is_invalid or not turn.format_ok):
            left_out["not valid"] += 1
        else:
            pairs.append(
                Pair(
                    observation=turn.observation,
                    action=turn.action,
                    completion="" if is_scripted and turn.text == turn.action else turn.text,
                    env_id=record.spec.env_id,
                    player=agent.model.uid,
                    outcome=record.outcomes[turn.pid],
                    game=record.spec.game_idx,
                    turn=number,
                )
            )
    return pairs, left_out


def env_of(pair: Pair, envs: tuple[TrainEnvSpec, ...]) -> TrainEnvSpec:
    """Return the env whose template a pair uses: the one that it names, or else the first."""
    return next((env for env in envs if env.env_id == pair.env_id), envs[0])


def write_line(pair: Pair) -> str:
    return to_line({key: value for key, value in asdict(pair).items() if value != ""}).decode()


def read_pairs(path: Path, env_ids: Collection[str] | None = None) -> list[Pair]:
    """Read a JSONL file of pairs: `observation` or `prompt`, `action` or `completion`; other fields are optional.

    env_ids: ids that a pair may name; None: any. Raises ConfigError with the number of every invalid line, or if the
    file has no pair.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"sft.data: {path} cannot be read: {error}") from error
    pairs, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                pairs.append(_pair(line, env_ids))
            except (ConfigError, ValueError, RecursionError) as error:  # of msgspec, or not UTF-8
                problems.append(f"{path}:{number}: {error}")
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"{path}: {len(problems) - SHOWN_PROBLEMS} more lines are invalid"]
    if not problems and not pairs:
        problems = [f"sft.data: there is no pair in {path}"]
    if problems:
        raise ConfigError(*problems)
    return pairs


def _pair(line: bytes, env_ids: Collection[str] | None) -> Pair:
    """Return the pair of a line. Raises ConfigError with the problem, msgspec.DecodeError for another form."""
    given = msgspec.json.decode(line, type=dict[str, Any])
    pair = msgspec.convert({name: value for name, value in given.items() if value is not None}, Pair)
    if env_ids is not None and pair.env_id and pair.env_id not in env_ids:
        raise ConfigError(f"no training env has the env_id {pair.env_id!r}; {suggestion(pair.env_id, env_ids)}")
    if not pair.observation and not pair.prompt:
        raise ConfigError("there is neither an 'observation' nor a 'prompt'")
    if not pair.action and not pair.completion:
        raise ConfigError("there is neither an 'action' nor a 'completion'")
    return pair
