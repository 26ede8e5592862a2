"""The turns that are worth imitating, and the file that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.game_records import make_record, make_spec
from unstable_lite.config.games import TrainEnvSpec
from unstable_lite.config.training import SftConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.answers import extract_boxed, written_answer
from unstable_lite.games.templates import TEMPLATES, Template
from unstable_lite.sft.pairs import Pair, env_of, pairs_of_game, read_pairs, write_line
from unstable_lite.types import (
    GameRecord,
    ModelRef,
    Turn,
)

ENVS = (
    TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2, prompt_template="tiny"),
    TrainEnvSpec(env_id="TicTacToe-v0-train", num_players=2, num_actors=2, prompt_template="qwen3-zs"),
)


def game(*players: str, wins: int | None = 0, invalid: tuple[int, ...] = (), badly_formed: int = -1) -> GameRecord:
    """Return a game of six turns, the players alternating; turn `badly_formed` does not have the requested form."""
    models = [ModelRef(uid=name, kind="fixed", name=name) for name in players]
    last_turns = {n % len(players): n for n in range(6)}
    bad = [last_turns[pid] for pid in invalid]
    turns = [
        Turn(
            pid=n % len(players),
            observation=f"o{n}",
            text=f"said {n}",
            action=f"[{n}]",
            format_ok=n != badly_formed,
            is_invalid=n in bad,
        )
        for n in range(6)
    ]
    rewards = [float(pid == wins) for pid in range(len(players))]
    ends: dict[str, Any] = {"end": "invalid" if invalid else "natural", "invalid_pids": invalid}
    return make_record(make_spec(*models, game_idx=7, env_id="Nim-v0-train"), *rewards, turns=turns, **ends)


def kept(record: GameRecord, **sft: Any) -> tuple[list[int], dict[str, int]]:
    pairs, left_out = pairs_of_game(record, SftConfig(**sft))
    return [pair.turn for pair in pairs], dict(left_out)


@pytest.mark.parametrize(
    ("record", "sft", "turns", "left_out"),
    [
        (game("a", "b"), {"filter": ()}, [0, 1, 2, 3, 4, 5], {}),
        (game("a", "b"), {"filter": ("winners",)}, [0, 2, 4], {"not the winner's": 3}),
        (game("a", "b", wins=None), {"filter": ("winners",)}, [], {"not the winner's": 6}),
        (game("a", "b", invalid=(1,)), {"filter": ("valid",)}, [0, 1, 2, 3, 4], {"not valid": 1}),
        (game("a", "b", badly_formed=2), {"filter": ("valid",)}, [0, 1, 3, 4, 5], {"not valid": 1}),
        (game("a", "b", invalid=(1,), badly_formed=2), {}, [0, 4], {"not the winner's": 3, "not valid": 1}),
        (
            game("a", "b"),
            {"filter": (), "imitate": ("b",), "players": ("a", "b")},
            [1, 3, 5],
            {"by a player that is not imitated": 3},
        ),
    ],
)
def test_filter_keeps_matching_turns_and_counts_the_rest(
    record: GameRecord, sft: dict[str, Any], turns: list[int], left_out: dict[str, int]
) -> None:
    assert kept(record, **sft) == (turns, left_out)


def test_any_reward_above_0_wins_a_single_player_game() -> None:
    lost = game("a", wins=None)
    lost.outcomes = {0: "na"}
    assert kept(lost) == ([], {"not the winner's": 6})
    lost.rewards = {0: 0.2}
    assert kept(lost)[0] == [0, 1, 2, 3, 4, 5]


def test_model_text_is_kept_and_a_scripted_player_writes_only_its_action() -> None:
    record = game("scripted:random", "google/gemini")
    record.turns = [
        replace(turn, text=turn.action if turn.pid == 0 else f"said {number}")
        for number, turn in enumerate(record.turns)
    ]
    record.turns[3] = replace(record.turns[3], text="[3]")
    pairs, _ = pairs_of_game(record, SftConfig(filter=()))
    assert pairs[3].completion == "[3]", "a model's missing form is not added"
    assert (pairs[0].observation, pairs[0].action, pairs[0].completion) == ("o0", "[0]", "")
    assert (pairs[1].observation, pairs[1].action, pairs[1].completion) == ("o1", "[1]", "said 1")
    assert (pairs[0].player, pairs[0].outcome, pairs[0].game, pairs[0].turn) == ("scripted:random", "win", 7, 0)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda template: template.name)
def test_answer_in_every_template_is_read_as_the_action(template: Template) -> None:
    for action in ("[4]", "[col 3]", "[Bid: 2, 5]", "[A] [B]"):
        answer = written_answer(template.prompt("o", 2), action)
        assert extract_boxed(answer) == (action, True)
        assert ("</think>" in answer) == template.text.endswith("<think>")


def test_pairs_survive_the_file_and_tolerate_missing_or_extra_keys(tmp_path: Path) -> None:
    pairs, _ = pairs_of_game(game("scripted:random", "b"), SftConfig(filter=()))
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(map(write_line, pairs)))
    assert read_pairs(path) == pairs
    path.write_text(
        '{"observation": "o", "action": "[1]"}\n\n{"prompt": "p", "completion": "c", "reward": 3, "env_id": null}\n'
    )
    assert read_pairs(path) == [Pair(observation="o", action="[1]"), Pair(prompt="p", completion="c")]


def test_pair_is_one_line_with_any_separators_in_its_text(tmp_path: Path) -> None:
    pair = Pair(observation="a\u2028b\x85c\u2029d\x1e\x0be\r\nf\rg", completion="h\u2028i")
    path = tmp_path / "pairs.jsonl"
    path.write_text(write_line(pair), encoding="utf-8")
    assert read_pairs(path) == [pair]


def test_lone_surrogate_of_an_endpoint_becomes_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(write_line(Pair(observation="o", completion="a\ud800")), encoding="utf-8")
    assert read_pairs(path) == [Pair(observation="o", completion="a?")]


def test_pair_belongs_to_its_named_env_or_to_the_first() -> None:
    assert env_of(Pair(env_id="TicTacToe-v0-train"), ENVS) == ENVS[1]
    assert env_of(Pair(env_id="Chess-v0"), ENVS) == env_of(Pair(), ENVS) == ENVS[0]


def test_bad_lines_are_refused_together_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    path.write_text(
        '{"prompt": "p", "completion": "c"}\n'
        '{"prompt": "p", "completion": \n'
        '{"prompt": "p", "answer": "c"}\n'
        '{"completion": "c"}\n'
        '["p", "c"]\n'
        '{"prompt": 1, "completion": "c"}\n'
        '{"prompt": "p", "completion": "c", "turn": "first"}\n'
        '{"prompt": "p", "completion": "\\ud800 and more text"}\n'
        '{"prompt": "p", "completion": "c", "env_id": "Nim-v0-trian"}\n'
        f'{{"prompt": "p", "completion": {"[" * 100_000}\n'
        '{"prompt": "p", "completion": "\udcff"}\n',
        errors="surrogateescape",
    )
    with pytest.raises(ConfigError) as caught:
        read_pairs(path, [env.env_id for env in ENVS])
    for problem, (number, says) in zip(
        caught.value.problems,
        [
            (2, "truncated"),
            (3, "'action'"),
            (4, "'observation'"),
            (5, "got `array`"),
            (6, "got `int` - at `$.prompt`"),
            (7, "got `str` - at `$.turn`"),
            (8, "surrogate"),
            (9, "did you mean 'Nim-v0-train'?"),
            (10, "recursion"),
            (11, "utf-8"),
        ],
        strict=True,
    ):
        assert f"{path}:{number}: " in problem and says in problem
    path.write_text("{\n" * 30)
    with pytest.raises(ConfigError, match="20 more"):
        read_pairs(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no pair"):
        read_pairs(path)
