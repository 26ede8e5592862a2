"""The answers that an observation allows, in the words of a model: its legal actions, each inside `\\boxed{}`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.games.templates import Template, find_extraction, written_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    actions: tuple[str, ...]
    answers: tuple[str, ...]
    """Text with which a model chooses each action."""


def questions(env: EnvSpec, template: Template, observations: Sequence[str]) -> Iterator[Question]:
    """Yield one question for each observation.

    Raises UnsupportedEnvError for an env family whose legal actions cannot be listed, EnvError for an observation of
    another env, ConfigError if the env's extraction does not read an answer as its action.
    """
    for observation in observations:
        prompt, actions = template.prompt(observation, env.num_players), legal_actions(env.env_id, observation)
        answers = tuple(written_answer(prompt, action) for action in actions)
        for action, answer in zip(actions, answers, strict=True):
            check_read(env, action, answer)
        yield Question(prompt=prompt, actions=tuple(actions), answers=answers)


def allowance_problem(env: EnvSpec) -> str | None:
    """Return the reason why an env has no exact result if it lets players repeat invalid moves, or None."""
    if not env.error_allowance:
        return None
    return (
        f"{env.env_id}: exact results count an illegal answer as the end of the game, and error_allowance = "
        f"{env.error_allowance}; set it to 0"
    )


def check_read(env: EnvSpec, action: str, answer: str) -> None:
    """Raise ConfigError if the env's extraction does not read an answer as this action."""
    if find_extraction(env.action_extraction_fn)(answer) != (action, True):
        raise ConfigError(
            f"action_extraction_fn {env.action_extraction_fn!r} does not read {answer!r} as {action!r}, so the "
            "probability of an action is not that of one answer"
        )
