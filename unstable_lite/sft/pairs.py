"""Observation-action pairs: which turns of a game become one, and how they lie in a file.

Owns the filter and the JSONL. Knows nothing of tokens, templates, training or who plays what: the same pairs serve any
model and any template.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from unstable_lite.config import SftConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.seats import is_remote
from unstable_lite.types import GameRecord, TrainEnvSpec

SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One turn to imitate: what was seen, and the answer to it."""

    observation: str = ""
    """What the env showed."""
    prompt: str = ""
    """What the model is shown; empty: the template of the env makes it of the observation."""
    action: str = ""
    """What the env was answered."""
    completion: str = ""
    """The whole answer; empty: the action, written as the template asks for it."""
    env_id: str = ""
    player: str = ""
    outcome: str = ""
    game: int = 0
    turn: int = 0


def pairs_of_game(record: GameRecord, config: SftConfig) -> tuple[list[Pair], Counter[str]]:
    """The turns of a finished game that are kept, and how many are left out for which reason."""
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for number, turn in enumerate(record.turns):
        agent = record.spec.agent_specs[turn.pid]
        assert agent.pid == turn.pid
        # What a model said stays as it said it; scripted players say nothing but their action.
        is_scripted = agent.model.kind == "fixed" and not is_remote(agent.model)
        if config.imitate is not None and agent.model.uid not in config.imitate:
            left_out["by a player that is not imitated"] += 1
        elif "winners" in config.filter and not _has_won(record, turn.pid):
            left_out["not the winner's"] += 1
        elif turn.is_cut_off:  # training on it would teach to stop there
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


def written_answer(prompt: str, action: str) -> str:
    """An action as our templates ask for it to be written; where the prompt has opened a thought, it is empty."""
    thought = "\n</think>\n\n" if prompt.rstrip().endswith("<think>") else ""
    return f"{thought}\\boxed{{{action}}}"


def env_of(pair: Pair, envs: tuple[TrainEnvSpec, ...]) -> TrainEnvSpec:
    """Whose template a pair is trained in: the env that it names, or else the first."""
    return next((env for env in envs if env.env_id == pair.env_id), envs[0])


def write_line(pair: Pair) -> str:
    return json.dumps({key: value for key, value in asdict(pair).items() if value != ""}, ensure_ascii=False) + "\n"


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a JSONL file: `observation` or `prompt`, `action` or `completion`; the other fields may be absent.

    Raises ConfigError with the number of every line that cannot be used, or if there is none that can.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold other separators, as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sft.data: {path} cannot be read: {error}") from error
    pairs, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                pairs.append(_pair(json.loads(line)))
            except json.JSONDecodeError as error:
                problems.append(f"{path}:{number}: not JSON: {error.msg}")
            except ConfigError as error:
                problems.append(f"{path}:{number}: {error}")
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"{path}: {len(problems) - SHOWN_PROBLEMS} more lines are as bad"]
    if not problems and not pairs:
        problems = [f"sft.data: there is no pair in {path}"]
    if problems:
        raise ConfigError(*problems)
    return pairs


def _has_won(record: GameRecord, pid: int) -> bool:
    """Who plays alone has won with any reward above 0."""
    if record.spec.num_players == 1:
        return record.rewards[pid] > 0
    return record.outcomes[pid] == "win"


def _pair(line: Any) -> Pair:
    """Raises ConfigError with what is wrong about the line."""
    if not isinstance(line, dict):
        raise ConfigError(f"a JSON object is expected, not {type(line).__name__}")
    given: dict[str, Any] = {}
    for field in fields(Pair):
        value = line.get(field.name)
        if value is not None:
            if not isinstance(value, str if field.type == "str" else int):
                raise ConfigError(f"{field.name!r} must be {'text' if field.type == 'str' else 'a whole number'}")
            given[field.name] = value
    pair = Pair(**given)
    if not pair.observation and not pair.prompt:
        raise ConfigError("there is neither an 'observation' nor a 'prompt'")
    if not pair.action and not pair.completion:
        raise ConfigError("there is neither an 'action' nor a 'completion'")
    return pair
