"""A JSONL file of questions as an env: reading, grading, order, and texts that count as an answer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fakes.game_records import BASE, make_generation
from unstable_lite.config.games import EnvSpec, EvalEnvSpec, TrainEnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.games import questions
from unstable_lite.games.env_catalogue import describe_envs, env_family, probe, trial
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.players.policy import PolicyPlayer
from unstable_lite.games.questions import is_right, read_questions
from unstable_lite.games.templates import TEMPLATES, Template, known_templates
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameRecord, Generation

SUMS = [{"question": f"{n} + {n}?", "answer": 2 * n} for n in range(5)]


def write(directory: Path, lines: list[Any], name: str = "sums") -> str:
    """Write a file of questions and return its env id."""
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return f"questions:{path}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", "42"), (" 42. ", "42"), ("+42", "42"), ("042", "42"), ("42.0", "42"), ("[42]", "42"), ("$42$", "42"),
        (r"\(42\)", "42"), (r"\text{42}", "42"), ("1,234,567", "1234567"), ("1{,}234", "1234"), (r"1\,234", "1234"),
        ("1/2", "0.5"), (".5", "1/2"), (r"\frac{1}{2}", "0.5"), (r"-\dfrac{1}{2}", "-.5"), (r"\frac{-1}{2}", "-1/2"),
        ("2/4", r"\frac{1}{2}"), ("-3", "\u22123"), ("- 3", "-3"), ("1 / 2", "0.5"), ("x + 1", "x+1"), ("5./2", "2.5"),
        ("1/3", "2/6"), (r"\left( 1, 2 \right)", "(1,2)"),
        ("Paris.", "paris"), ("New  York", "new york"), ("[1,2]", "[1, 2]"), ("1,2", "1, 2"),
        (r"\dfrac{x}{2}", r"\frac{x}{2}"),
        (r"\$18", "18"), (r"\$18.00", "18"), ("18", r"\$18"), (r"$\$1{,}800$", "1800"), (r"-\$5", "-5"),
        ("\u20ac5", "5"),
        (r"18\%", "18"), ("18 %", "18%"), (r"\#18", "18"), (r"90^\circ", "90"), (r"90^{\circ}", "90\u00b0"),
        (r"\frac12", "1/2"), (r"\frac{1}2", "1/2"), (r"\frac 1 2", "1/2"), (r"\cfrac{1}{2}", "0.5"),
        (r"\tfrac1{2}", "0.5"),
        (r"3\frac{1}{2}", "7/2"), ("3 1/2", "3.5"), (r"-3\frac12", "-7/2"), (r"\frac{\pi}{2}", "\u03c0/2"),
        (r"\frac{\text{x}}{2}", "x/2"), (r"2 \pi", r"2\pi"), (r"\dfrac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}"),
        (r"1\,000", "1000"), (r"12\;345\;678", "12345678"), (r"1,\!000", "1000"), (r"1~000", "1000"),
        (r"\mbox{yes}", "yes"), (r"\text{(A)}", "A"), ("(a)", "A"), (r"\mathbf{B}.", "(B)"),
        (r"\text{\textit{no}}", "no"),
        (r"\{1,2\}", "{1,2}"), ("{1,2}", "{1, 2}"), (r"\left\{1,2\right\}", r"\{1, 2\}"),
        (r"\left[0,1\right)", "[0,1)"),
        (r"x^{2}", "x^2"), (r"5\,\mathrm{cm}", "5 cm"), (r"5\text{ cm}", "5cm"), (r"\boxed{18}", "18"), ("{18}", "18"),
        ("\uff11\uff12", "12"), (r"\infty", "\u221e"), (r"x \leq 3", "x\u22643"),
        (r"\frac{2\pi}{3}", r"2\pi/3"), (r"\frac{2\pi}{3}", r"(2\pi)/3"), (r"\sqrt2", r"\sqrt{2}"),
        (r"\frac{\sqrt3}{2}", r"\dfrac{\sqrt{3}}{2}"),
    ],
)  # fmt: skip
def test_answers_that_mean_the_same_are_right(answer, expected):
    assert is_right(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", "43"), ("-42", "42"), ("1/3", "0.333"), ("0.1", "0.10000000000000001"), ("1/0", "0"), ("1/0", "1"),
        ("f(2)/3", "f2/3"), ("3/(2x)", "3/2x"),
        ("", "0"), ("4 2", "42"), ("newyork", "new york"), ("4 2 apples", "42"),
        ("12", "1,2"), ("1,23", "123"), ("4, 2", "4"), ("1e3", "1000"),
        ("1/2/3", "1/6"), ("0,1", "[0,1]"), ("Paris", "Pari"), ("--3", "3"),
        ("\u0664\u0662", "42"), ("9" * 5000, "9" * 5001),
        (r"\frac{1}{2}", "12"), (r"\frac12", "12"), (r"\frac{1}{2}", "2"), (r"\frac{11}{2}", r"1\frac{1}{2}"),
        ("3 1/2", "31/2"),
        (r"3\frac{1}{2}", "3/2"), (r"\frac{x+1}{2}", "x+1/2"), (r"\frac{1}{2x}", "1/2x"), (r"2^{10}", "210"),
        ("x_1", "x1"),
        ("-5", "5"), (r"-\$5", "5"), ("+-5", "-5"), (r"\$18", r"18\%"), ("18%", "0.18"), ("90\u00b0", "90%"),
        (r"\#2", "$2"),
        (r"\sqrt{4}", "4"), (r"\sqrt{4}", "2"), (r"0.\overline{3}", "0.3"), (r"\left|-5\right|", "5"), ("5!", "5"),
        ("1200", "1, 200"), ("1, 200", "1200"), (r"1\,00", "100"), (r"1\,0000", "10000"), (r"1\quad 234", "1234"),
        ("1,000", "[1, 000]"), (r"\{5\}", "5"), ("5", r"\{5\}"), ("5", "{5}"), ("(1,2)", "1,2"), (r"\{1,2\}", "1,2"),
        ("f(x)", "fx"), ("(AB)", "AB"), (r"\text{not }5", "5"), (r"\text{yes}", "no"), ("2 3", "23"), ("4 1/2", "4.12"),
    ],
)  # fmt: skip
def test_answers_that_differ_are_wrong(answer, expected):
    assert not is_right(answer, expected)


def test_a_file_has_texts_numbers_and_ids(tmp_path):
    lines = [
        {"question": "a\u2028b", "answer": 0.1}, {"question": "c", "answer": 1e22, "id": 7},
        {"question": "d", "answer": "x", "id": "seven"}, {"question": "e", "answer": 10**30},
    ]  # fmt: skip
    env_id = write(tmp_path, lines)
    path = Path(env_id.partition(":")[2])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    items = read_questions(env_id).items
    assert [item.question for item in items] == ["a\u2028b", "c", "d", "e"]
    assert [item.expected for item in items] == ["0.1", "1" + 22 * "0", "x", "1" + 30 * "0"]
    assert [item.id for item in items] == [None, 7, "seven", None]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no question"),
        (b"\n \n", "has no question"),
        (b'{"question": "a", "answer": 1}\nnot JSON', ".jsonl:2: "),
        (b'{"question": "a", "answer": 1}\n[1]', ".jsonl:2: Expected `object`, got `array`"),
        (b'{"problem": "a", "answer": 1}', ".jsonl:1: Object contains unknown field `problem`"),
        (b'{"answer": 1}', "missing required field `question`"),
        (b'{"question": "a"}', "missing required field `answer`"),
        (b'{"question": 5, "answer": 1}', "Expected `str`, got `int` - at `$.question`"),
        (b'{"question": "a", "answer": true}', "got `bool` - at `$.answer`"),
        (b'{"question": "a", "answer": null}', "got `null` - at `$.answer`"),
        (b'{"question": "a", "answer": [1]}', "got `array` - at `$.answer`"),
        (b'{"question": "a", "answer": NaN}', ".jsonl:1: JSON is malformed"),
        (b'{"question": "a", "answer": ' + b"1" * 5000 + b"}", "out of range - at `$.answer`"),
        (b'{"question": "a", "answer": 1, "x": ' + b"[" * 100_000, "unknown field `x`"),
        (b'{"question": " ", "answer": 1}', "the question or the answer is empty"),
        (b'{"question": "a", "answer": " "}', "the question or the answer is empty"),
        (b'{"question": "a", "answer": 1}\n{"question": "a ", "answer": 2}', ".jsonl:2: line 1 has the same question"),
        (b'{"question": "a", "answer": 1, "id": 1}\n{"question": "b", "answer": 2, "id": "1"}', "has the same id"),
        ('{"question": "café", "answer": 1}'.encode("latin-1"), ".jsonl:1: Invalid UTF-8"),
        ('{"question": "a", "answer": 1}'.encode("utf-16"), ".jsonl:1: "),
        (b"x\n" * 10, "; 7 more lines are invalid; write a question a line"),
    ],
)
def test_bad_file_is_refused_with_file_and_line(tmp_path, content, says):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    problem = str(probe(f"questions:{path}", 1).problem).replace("'utf-8' codec can't decode", "Invalid UTF-8")
    assert says in problem and str(path) in problem  # the second wording is msgspec's since 0.23


def test_what_is_not_a_readable_file_is_refused(tmp_path, monkeypatch):
    def problem(name: str) -> str:
        return str(probe(f"questions:{tmp_path / name}", 1).problem)

    assert "No such file or directory; a relative path starts at the working directory" in problem("absent.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is not a file" in problem("folder.jsonl") and "is not a file" in problem("pipe.jsonl")
    monkeypatch.setattr(questions, "MOST_BYTES", 10)
    write(tmp_path, SUMS, "large")
    assert "split the file" in problem("large.jsonl")


def test_settings_of_other_envs_are_refused(tmp_path):
    env_id = write(tmp_path, SUMS)
    assert probe(env_id, 1).problem is None
    assert "set num_players = 1" in str(probe(env_id, 2).problem)
    assert "leave them out" in str(probe(env_id, 1, "board").problem)
    assert "leave them out" in str(probe(env_id, 1, "env", (("a", 1),)).problem)
    with pytest.raises(ConfigError, match="one player"):
        environment_of(EnvSpec(env_id=env_id, num_players=2), 0)


def test_envs_lists_the_form_of_questions():
    assert ("questions:PATH.jsonl", "1") in [row[:2] for row in describe_envs()]
    assert env_family("questions:/a/Poker-v0.jsonl") == "questions:/a/Poker-v0.jsonl", "no family of TextArena"


def env_of(env_id: str, **keys: Any) -> EvalEnvSpec:
    return EvalEnvSpec(env_id=env_id, num_players=1, prompt_template="tiny", **keys)


async def ask(
    env: EvalEnvSpec | TrainEnvSpec, text: str, seed: int = 1, template: Template = TEMPLATES["tiny"]
) -> GameRecord:

    async def generate(*_: Any, **__: Any) -> Generation:
        return make_generation([0], text=text)

    record = new_record(new_game(env, [BASE], seed // 2, "eval", seed))
    player = PolicyPlayer(generate, template, record.spec.agent_specs[0], 1)
    await run_game(record, environment_of(env, seed), {0: player})
    return record


@pytest.mark.parametrize(
    ("text", "reward", "is_answered"),
    [
        (r"2 + 2 is \boxed{4}", 1.0, True), (r"\boxed{5}, no: \boxed{\frac{8}{2}}", 1.0, True),
        (r"\boxed{4}, no: \boxed{5}", 0.0, True), (r"<think>\boxed{5}</think>\boxed{4}", 1.0, True),
        (r"\boxed{[4]}", 1.0, True), ("4", 0.0, False), ("[4]", 0.0, False), (r"\boxed{4", 0.0, False),
        (r"\boxed{}", 0.0, False), (r"\boxed{\text{ }}", 0.0, False), (r"\boxed{\text{4}}", 1.0, True),
        (r"<think>\boxed{4}", 0.0, False), (r"\boxed{4}<think>but", 0.0, False), ("", 0.0, False),
    ],
)  # fmt: skip
async def test_only_the_last_box_outside_thinking_is_the_answer(tmp_path, text, reward, is_answered):
    record = await ask(env_of(write(tmp_path, SUMS)), text, seed=5)
    assert record.turns[0].observation == "2 + 2?"
    assert (record.rewards, record.outcomes) == ({0: reward}, {0: "win" if reward else "loss"})
    assert (record.end, record.invalid_pids) == (("natural", ()) if is_answered else ("invalid", (0,)))
    assert record.turns[0].format_ok is is_answered


async def test_custom_extraction_is_kept_and_neither_thinking_nor_no_answer_is_right(tmp_path):
    env, template = env_of(write(tmp_path, SUMS)), TEMPLATES["default-think"]
    assert (await ask(env, r"\boxed{4}", 5, template)).invalid_pids == (0,)
    assert (await ask(env, r"so \boxed{5}</think>\boxed{4}", 5, template)).rewards == {0: 1.0}
    env = env_of(write(tmp_path, SUMS), action_extraction_fn=f"{__name__}:whole")
    assert (await ask(env, "4", 5)).rewards == {0: 1.0}
    env = env_of(write(tmp_path, [{"question": "Sign of the dollar?", "answer": "$"}], "dollar"))
    assert (await ask(env, "", 1)).rewards == {0: 0.0}
    assert (await ask(env, r"\boxed{$}", 1)).rewards == {0: 1.0}


def whole(text: str) -> tuple[str, bool]:
    return text, True


def test_missing_answer_is_asked_for_again_if_allowed(tmp_path):
    game = environment_of(EnvSpec(env_id=write(tmp_path, SUMS), num_players=1, error_allowance=1), 5)
    turn = game.play("")
    assert turn is not None and "Answer again" in turn[1] and game.was_invalid
    assert game.play("4") is None and not game.was_invalid
    assert game.close()[0] == {0: 1.0}


def test_training_games_choose_the_question_by_the_seed(tmp_path):
    env_id = write(tmp_path, SUMS)
    env = TrainEnvSpec(env_id=env_id, num_players=1, num_actors=1)
    asked = {environment_of(env, seed).observe()[1] for seed in range(0, 40, 2)}
    assert asked == {line["question"] for line in SUMS}


def test_question_has_one_turn_and_a_template_without_words_of_games():
    env = TrainEnvSpec(env_id="questions:examples/arithmetic.jsonl", num_players=1, num_actors=1)
    assert trial(env).lengths == (1,)
    text = known_templates({})["question"].message("2 + 2?", 1)  # type: ignore[union-attr]
    assert text.startswith("2 + 2?") and r"\boxed{}" in text and "game" not in text
