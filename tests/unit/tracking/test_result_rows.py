"""Rows of results: order, reference, change and verdict."""

import math
from dataclasses import replace

import pytest

from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.intervals import student
from unstable_lite.tracking.result_rows import ResultRow, result_rows, seeds_rows, to_markdown, with_games


def evaluation(step: int, wins: int, losses: int, opponent: str = "scripted:random", seats: int = 2) -> Evaluation:
    """Return an evaluation whose wins and losses are spread over deals of `seats` games."""
    scores = [1.0] * wins + [0.0] * losses
    return Evaluation(
        label=f"update {step}" if step else "before",
        model=f"ckpt-{step}" if step else "base",
        step=step,
        env_id="Nim-v0-train",
        opponent=opponent,
        n=wins + losses,
        wins=wins,
        draws=0,
        losses=losses,
        invalid=0,
        void=0,
        mean_reward=(wins - losses) / max(wins + losses, 1),
        reward_std=1.0,
        scores=tuple(tuple(scores[i : i + seats]) for i in range(0, len(scores), seats)),
    )


def row(*evaluations: Evaluation) -> ResultRow:
    (only,) = result_rows(evaluations)
    return only


def test_rows_are_in_the_order_of_the_config_and_concurrent_ones_are_last() -> None:
    ones = [evaluation(0, 5, 5, name) for name in ("scripted:first", "scripted:unknown", "base")]
    rows = result_rows(
        [replace(ones[0], label="concurrent"), *ones], [("Nim-v0-train", "base"), ("Nim-v0-train", "scripted:first")]
    )
    assert [one.label for one in rows] == ["base", "first", "unknown", "first"]
    assert [one.is_concurrent for one in rows] == [False, False, False, True]


def test_label_names_the_env_only_if_there_are_several() -> None:
    first = evaluation(0, 5, 5, "scripted:random, greedy")
    alone = replace(first, env_id="TwentyQuestions-v0", opponent="none, greedy")
    assert [one.label for one in result_rows([first])] == ["random, greedy"]
    assert [one.label for one in result_rows([alone])] == ["TwentyQuestions-v0, greedy"]
    assert [one.label for one in result_rows([first, alone])] == [
        "Nim-v0-train, random, greedy",
        "TwentyQuestions-v0, greedy",
    ]


def test_row_goes_from_the_first_update_to_the_newest_in_any_order_of_lines() -> None:
    found = row(evaluation(85, 60, 40), evaluation(170, 70, 30), evaluation(0, 50, 50), evaluation(255, 0, 0))
    assert [one.step for one in found.evaluations] == [0, 85, 170]
    assert found.change_text == "+20.0"


@pytest.mark.parametrize(
    ("before", "after", "verdict", "text"),
    [
        (100, 180, "good", "better than before; wins 90 of 100"),
        (2, 20, "open", "better than before; still loses 90 of 100"),
        (50, 104, "open", "better than before; about even"),
        (180, 100, "bad", "worse than before; about even"),
        (180, 20, "bad", "worse than before; loses 90 of 100"),
        (100, 199, "good", "better than before; wins 99 of 100"),
        (100, 200, "good", "better than before; wins 100 of 100"),
        (180, 181, "open", "no clear change; wins 90 of 100"),
    ],
)
def test_only_a_policy_that_gained_and_wins_more_than_half_is_good(
    before: int, after: int, verdict: str, text: str
) -> None:
    found = row(evaluation(0, before, 200 - before), evaluation(85, after, 200 - after))
    assert (found.verdict, found.verdict_text) == (verdict, text)
    assert found.reference_text == "50 %: equal players"


@pytest.mark.parametrize("seats", [1, 3])
def test_games_from_other_than_two_seats_are_compared_with_the_first_value(seats: int) -> None:
    found = row(evaluation(0, 30, 270, seats=seats), evaluation(85, 90, 210, seats=seats))
    assert found.reference == 0.1
    assert found.reference_text == "10.0 % before training"
    assert (found.verdict, found.verdict_text) == ("good", "better than before")


def test_perfect_play_makes_half_of_the_points_the_best_possible() -> None:
    assert row(evaluation(0, 5, 5, "scripted:optimal, greedy")).reference_text == "50 %: the best possible"


def test_single_evaluation_has_no_change() -> None:
    found = row(evaluation(0, 5, 5))
    assert (found.change, found.change_text, found.change_interval_text) == (None, "–", "–")
    assert (found.verdict, found.verdict_text) == ("open", "one evaluation so far")


def test_change_without_common_seeds_has_the_interval_of_two_independent_results() -> None:
    first, last = (replace(one, scores=()) for one in (evaluation(0, 40, 60), evaluation(85, 60, 40)))
    change = row(first, last).change
    assert change is not None and change.seeds == 0
    half = math.hypot(last.points - last.interval[0], first.interval[1] - first.points)
    assert change.low == pytest.approx(0.2 - half)


def test_reward_of_one_game_has_neither_interval_nor_change_with_one() -> None:
    alone = replace(evaluation(0, 1, 0), wins=0, mean_reward=0.25, reward_std=math.nan, scores=(), opponent="none")
    found = row(alone, replace(alone, step=85, mean_reward=0.5))
    assert [one.value_text for one in found.evaluations] == ["0.250", "0.500"]
    assert found.newest.interval_text == "–"
    assert (found.change_text, found.change_interval_text) == ("+0.250", "–")
    assert found.verdict == "open"


def test_share_is_written_once_and_rounded_as_python_rounds() -> None:
    newest = evaluation(255, 349, 51)
    assert newest.value_text == "87.2 %"
    low, high = newest.interval
    assert newest.interval_text == f"{100 * low:.1f}–{100 * high:.1f}"


def test_seeds_are_compared_at_the_updates_that_all_of_them_reached() -> None:
    whole = row(evaluation(0, 160, 240), evaluation(20, 200, 200), evaluation(200, 360, 40))
    killed = row(evaluation(0, 160, 240), evaluation(20, 240, 160))
    (found,) = seeds_rows([[whole], [killed]])
    assert [one.step for one in found.evaluations] == [0, 20]
    assert (found.before.value_text, found.newest.value_text, found.newest.n) == ("40.0 %", "55.0 %", 800)
    (found,) = seeds_rows([[whole], [row(evaluation(0, 160, 240))]])
    assert found is whole  # the other has no later result
    assert seeds_rows([[row(evaluation(0, 1, 1))], [row(evaluation(20, 1, 1))]]) == []


def test_seed_whose_games_were_all_void_is_left_out_of_the_seeds():
    played = row(evaluation(0, 160, 240), evaluation(20, 200, 200))
    void = row(*(replace(one, n=0, wins=0, losses=0, void=12, mean_reward=math.nan) for one in played.evaluations))
    assert seeds_rows([[void], [played]]) == [played]
    assert seeds_rows([[void], [void]]) == [void]
    assert with_games([void, played]) is played and with_games([void]) is void


@pytest.mark.parametrize("is_share", [True, False], ids=["points", "reward"])
def test_spread_between_seeds_counts_as_chance(is_share: bool) -> None:
    def together(*ends: int) -> ResultRow:
        rows = [row(evaluation(0, 120, 280), evaluation(20, end, 400 - end)) for end in ends]
        if not is_share:
            rows = [replace(one, evaluations=tuple(map(as_reward, one.evaluations))) for one in rows]
        (found,) = seeds_rows([[one] for one in rows])
        return found

    apart = together(120, 200, 360)  # 400 games each: together they would be conclusive
    half = student(2) * math.sqrt(0.28 / 3 / 3)  # gained 0, 0.2 and 0.6: variance 0.28 / 3
    assert apart.verdict == "open"
    assert apart.change is not None
    assert (apart.change.low, apart.change.high) == pytest.approx(
        (0.8 / 3 - half, min(0.8 / 3 + half, 1.0 if is_share else math.inf))
    )
    assert is_share is (apart.newest.interval[1] == 1.0)
    alike = together(200, 204, 208)
    assert alike.change is not None and alike.change.low > 0


def as_reward(one: Evaluation) -> Evaluation:
    """Return the evaluation of an env for one player, with the share of the wins as its mean reward."""
    return replace(one, wins=0, draws=0, losses=0, mean_reward=one.wins / one.n, scores=(), opponent="none")


def test_markdown_has_a_row_each_and_names_runs_only_if_there_are_several() -> None:
    rows = [row(evaluation(0, 200, 200, "base"), evaluation(255, 349, 51, "base"))]
    head, dashes, only = to_markdown({"seed 0": rows}).splitlines()
    assert head == "| against | before | newest (95 %) | n | change (95 %) | in words |"
    assert dashes == "| --- | --- | --- | --- | --- | --- |"
    newest = rows[0].newest
    assert only.startswith(f"| base | 50.0 % | 87.2 % ({newest.interval_text}) | 400 | {rows[0].change_text} (")
    assert only.endswith(f" | {rows[0].verdict_text} |")
    several = to_markdown({"a|b": rows, "c": rows}).splitlines()
    assert [line.split(" | ")[0] for line in several] == ["| run", "| ---", r"| a\|b", "| c"]


def test_opponent_whose_games_are_all_void_has_a_row_that_says_so() -> None:
    void = [replace(evaluation(step, 0, 0, "module:Lost"), void=12, mean_reward=math.nan) for step in (0, 20)]
    with_games, without = result_rows([evaluation(0, 5, 5), evaluation(20, 6, 4), *void])
    assert [one.n for one in with_games.evaluations] == [10, 10]
    assert (without.label, without.newest.value_text, without.change_text) == ("module:Lost", "–", "–")
    assert without.verdict_text == "no result: all 12 games were void"
    assert to_markdown({"run": [without]})
