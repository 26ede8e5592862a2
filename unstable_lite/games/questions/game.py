"""A question as a game of one player and one turn, used like `games.environments.Environment`."""

from __future__ import annotations

from typing import Any

from unstable_lite.errors import ConfigError
from unstable_lite.games.questions.grading import is_right
from unstable_lite.games.questions.reader import read_questions
from unstable_lite.rng import question_number


class QuestionGame:
    """The reward is 1 for the right answer and 0 for any other. No answer counts as an invalid move."""

    has_teams = False
    num_players = 1

    def __init__(self, env_id: str, num_players: int, seed: int, error_allowance: int = 0) -> None:
        """Choose the question by the seed. `error_allowance`: number of times that no answer may be repeated.

        Raises ConfigError for a file that cannot be used, or another number of players.
        """
        if num_players != 1:
            raise ConfigError(f"a question has one player, not num_players = {num_players}")
        questions = read_questions(env_id).items
        self.env_id = env_id
        self._asked = questions[question_number(seed) % len(questions)]
        self.was_invalid = False
        """Whether the last action was no answer."""
        self._error_allowance = error_allowance
        self._num_errors = 0
        self._is_right = False

    def reseed(self, seed: int) -> None:
        """Do nothing: after its choice of a question, a game has no chance."""

    def observe(self) -> tuple[int, str]:
        """Return player 0 and the question."""
        remark = "\n\nThere was no answer inside \\boxed{}. Answer again." * bool(self._num_errors)
        return 0, self._asked.question + remark

    def step(self, action: str) -> bool:
        """Judge the content of the answer's box, empty without one; return whether the game is over."""
        self.was_invalid = not action.strip()
        self._is_right = not self.was_invalid and is_right(action, self._asked.expected)
        self._num_errors += self.was_invalid
        return not self.was_invalid or self._num_errors > self._error_allowance

    def play(self, action: str) -> tuple[int, str] | None:
        """Call `step`, and `observe` unless the game is over."""
        return None if self.step(action) else self.observe()

    async def advance(self, action: str) -> tuple[int, str] | None:
        """Call `play`. It is async because an isolated env, used in the same way, waits for its process."""
        return self.play(action)

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        """Return the reward, and remarks that hold the question's id."""
        reason = "There was no answer inside \\boxed{}; " * self.was_invalid + f"expected: {self._asked.expected}"
        return self.rewards_so_far(), {0: {"id": self._asked.id, "invalid_move": self.was_invalid, "reason": reason}}

    def rewards_so_far(self) -> dict[int, float]:
        return {0: float(self._is_right)}

    def drop(self) -> None:
        """Abandon the game, finished or not."""
