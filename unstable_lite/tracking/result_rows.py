"""Result rows: how the policy does in each env against each opponent, in numbers and in words, for all views of a run.

Owns the order of opponents, the reference that a result is compared with, and the verdict. Knows no files and no
layouts: evaluations go in, texts come out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Literal

from unstable_lite.config.games import against
from unstable_lite.printable import markdown_table
from unstable_lite.tracking.displayed_metrics import named
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.intervals import Gain, gain_over, seeds_interval, unpaired_difference

SCRIPTED = "scripted:"
OPTIMAL = "scripted:optimal"


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """The policy in one env against one opponent: its evaluations with games, and their change."""

    label: str
    """Short name: the opponent, or the env if there is none; with the env if the run is evaluated in several, and with
    the policy if several learn."""
    env_id: str
    opponent: str
    """Name in results, with the sampling if the env has its own."""
    is_concurrent: bool
    """Whether the games are played during training, without a quota."""
    evaluations: tuple[Evaluation, ...]
    """Evaluations with games in the order of their updates; those with void games alone if there are no others."""

    @property
    def policy(self) -> str:
        """Name of the policy, if several learn."""
        return self.newest.policy

    @property
    def key(self) -> tuple[bool, str, str, str]:
        """Place among the rows of other runs: the same policy, env and opponent."""
        return self.is_concurrent, self.policy, self.env_id, self.opponent

    @property
    def title(self) -> str:
        """Full name: the value, the opponent, and the env."""
        value, when = self.newest.value_name.capitalize(), ", while training" * self.is_concurrent
        return f"{value}{f' of {self.policy}' * bool(self.policy)}{against(self.opponent)} in {self.env_id}{when}"

    @property
    def before(self) -> Evaluation:
        """The first evaluation, which is that of the untrained policy if its update is 0."""
        return self.evaluations[0]

    @property
    def newest(self) -> Evaluation:
        return self.evaluations[-1]

    @cached_property
    def change(self) -> Gain | None:
        """Change from the first to the newest evaluation, by pairs of games with the same seed and seat if possible."""
        before, newest = self.before, self.newest
        if newest is before or not newest.n:
            return None
        old, new = ((one.value, *one.interval) for one in (before, newest))
        return newest.change_since(before) or unpaired_difference(old, new, 1.0 if newest.is_share else math.inf)

    @property
    def direction(self) -> int:
        """1 if the newest result is better than the first beyond the 95 % interval of the change, -1 if worse."""
        return 0 if self.change is None else (self.change.low > 0) - (self.change.high < 0)

    @property
    def change_text(self) -> str:
        """Text of the change: `+25.2` percentage points, or in reward."""
        return "–" if self.change is None else self._signed(self.change.mean)

    @property
    def change_interval_text(self) -> str:
        """Text of the 95 % interval of the change: `+19.3 to +31.0`."""
        gain = self.change
        return "–" if gain is None or math.isinf(gain.low) else f"{self._signed(gain.low)} to {self._signed(gain.high)}"

    def _signed(self, difference: float) -> str:
        return f"{100 * difference:+.1f}" if self.newest.is_share else f"{difference:+.3f}"

    @property
    def is_even(self) -> bool:
        """Whether two equal players would share the points: two players who have played each deal from both seats."""
        return self.newest.is_share and bool(self.newest.scores) and all(len(deal) == 2 for deal in self.newest.scores)

    @property
    def reference(self) -> float:
        """Value to compare with: half of the points if `is_even`, else the first value."""
        return 0.5 if self.is_even else self.before.value

    @property
    def reference_text(self) -> str:
        if not self.is_even:
            return f"{self.before.value_text} before training" if not self.before.step else "the first evaluation"
        return "50 %: the best possible" if self.opponent.startswith(OPTIMAL) else "50 %: equal players"

    @property
    def verdict(self) -> Literal["good", "bad", "open"]:
        """Judgement by the 95 % intervals: good only if better than before and better than the reference."""
        is_good = self.direction > 0 and self.newest.interval[0] > self.reference
        return "good" if is_good else "bad" if self.direction < 0 else "open"

    @property
    def verdict_text(self) -> str:
        """Text of the verdict, with the games that are still lost."""
        newest, (low, high) = self.newest, self.newest.interval
        if not newest.n:
            return f"no result: all {newest.void:,} games were void"
        if self.change is None:
            return "one evaluation so far"
        change = {0: "no clear change", 1: "better than before", -1: "worse than before"}[self.direction]
        if not self.is_even:
            return change
        if high < 0.5:
            return f"{change}; {'still ' * (self.direction > 0)}loses {_of_100(newest.losses, newest.n)}"
        return f"{change}; wins {_of_100(newest.wins, newest.n)}" if low > 0.5 else f"{change}; about even"


def _of_100(games: int, n: int) -> str:
    return f"{100 if games == n else min(round(100 * games / n), 99)} of 100"


def result_rows(evaluations: Iterable[Evaluation], order: Sequence[tuple[str, str]] = ()) -> list[ResultRow]:
    """Return a row for each policy, env and opponent that was evaluated.

    order: env and opponent of each eval env of the config, which come first; evaluations while training come last.
    """
    found = defaultdict[tuple[bool, str, str, str], list[Evaluation]](list)
    for one in sorted(evaluations, key=lambda one: one.step):
        found[one.label == "concurrent", one.policy, one.env_id, one.opponent].append(one)
    policies = [*dict.fromkeys(policy for _, policy, *_ in found)]
    keys = sorted(found, key=lambda key: (key[0], policies.index(key[1]), row_place((key[0], *key[2:]), order)))
    cells = [*order, *(key[2:] for key in keys)]
    return [
        ResultRow(
            label=row_label(*key[2:], cells, key[1]),
            env_id=key[2],
            opponent=key[3],
            is_concurrent=key[0],
            evaluations=tuple([one for one in found[key] if one.n] or found[key]),
        )
        for key in keys
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedsEvaluation(Evaluation):
    """One evaluation of several seeds. They count alike, and the intervals are t-intervals over them."""

    of_seeds: tuple[Evaluation, ...]

    @property
    def points(self) -> float:
        return fmean(one.points for one in self.of_seeds)

    @property
    def interval(self) -> tuple[float, float]:
        return seeds_interval([one.value for one in self.of_seeds], *(0.0, 1.0) if self.is_share else ())

    def change_since(self, before: Evaluation) -> Gain | None:
        assert isinstance(before, SeedsEvaluation)
        gained = [new.value - old.value for old, new in zip(before.of_seeds, self.of_seeds, strict=True)]
        return gain_over(gained, 1.0 if self.is_share else math.inf)


def side_by_side(rows: Sequence[Sequence[ResultRow]]) -> list[list[ResultRow | None]]:
    """Return a line for each policy, env and opponent, those while training last, with the row of each run or group."""
    by_key = [{row.key: row for row in of_run} for of_run in rows]
    keys = dict.fromkeys(key for of_run in by_key for key in of_run)
    return [[of_run.get(key) for of_run in by_key] for key in sorted(keys, key=lambda key: key[0])]


def with_games(rows: Sequence[ResultRow]) -> ResultRow:
    """Return the first of one or more rows that has a game with a result, or the first: its facts stand for all."""
    return next((row for row in rows if row.newest.n), rows[0])


def seeds_rows(of_seeds: Sequence[Sequence[ResultRow]]) -> list[ResultRow]:
    """Return the rows of several seeds together, with the updates at which all of them were evaluated.

    A seed with only one evaluation is left out if others have more.
    """
    together = []
    for line in side_by_side(of_seeds):
        known = [row for row in line if row is not None]
        rows = [row for row in known if row.newest.n] or known[:1]
        seeds = [row for row in rows if len(row.evaluations) > 1] or rows
        by_update = [{one.step: one for one in row.evaluations} for row in seeds]
        if len(seeds) == 1:
            together += seeds
        elif shared := sorted(set.intersection(*map(set, by_update))):
            evaluations = tuple(_together([of_seed[update] for of_seed in by_update]) for update in shared)
            together.append(replace(seeds[0], evaluations=evaluations))
    return together


def to_markdown(rows_by_run: Mapping[str, Sequence[ResultRow]]) -> str:
    """Return the rows as a table in Markdown, with a column for the run if there are several."""
    head = ["run"] * (len(rows_by_run) > 1) + ["against", "before", "newest (95 %)", "n", "change (95 %)", "in words"]
    table = [head]
    for run, row in ((run, row) for run, rows in rows_by_run.items() for row in rows):
        newest, name = row.newest, f"{row.label}{', while training' * row.is_concurrent}"
        value = f"{newest.value_text} ({newest.interval_text})"
        change = f"{row.change_text} ({row.change_interval_text})"
        cells = [name, row.before.value_text, value, f"{newest.n:,}", change, row.verdict_text]
        table.append([run] * (len(rows_by_run) > 1) + cells)
    return markdown_table(table)


def _together(evaluations: Sequence[Evaluation]) -> Evaluation:
    values = {one.name: getattr(evaluations[0], one.name) for one in fields(Evaluation)}
    for name in ("n", "wins", "draws", "losses", "invalid", "void", "choices", "optimal"):
        values[name] = sum(getattr(one, name) for one in evaluations)
    values["mean_reward"] = fmean(one.mean_reward for one in evaluations)
    return SeedsEvaluation(**values, of_seeds=tuple(evaluations))


def row_place(key: tuple[bool, str, str], order: Sequence[tuple[str, str]]) -> int:
    """Return the place, from 1, of the row with this key. `order`: see `result_rows`."""
    place = order.index(key[1:]) if key[1:] in order else len(order)
    return 1 + place + key[0] * (len(order) + 1)


def row_label(env_id: str, opponent: str, cells: Iterable[tuple[str, str]], policy: str = "") -> str:
    """Return the short name of a row, among all envs and opponents that the run is evaluated on."""
    name, _, sampling = opponent.partition(", ")
    has_envs = any(other != env_id for other, _ in cells)
    shown = [env_id] * (has_envs or name == "none") + [name.removeprefix(SCRIPTED)] * (name != "none")
    return named(policy, ", ".join([*shown, *[sampling] * bool(sampling)]))
