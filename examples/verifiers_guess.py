"""An environment of `verifiers` as its authors write one: a game of several turns, and `load_environment`."""

import re

import verifiers as vf
from datasets import Dataset


class GuessEnv(vf.MultiTurnEnv):
    """The reply to a wrong guess says whether the number is higher or lower."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: object) -> vf.Messages:
        guess, number = _guess(messages[-1].content), int(state["answer"])
        text = "Write a number." if guess is None else "Higher." if guess < number else "Lower."
        if guess == number:
            state["final_env_response"] = [vf.UserMessage(content="Yes.")]
        return [vf.UserMessage(content=text)]


def load_environment(highest: int = 9, max_turns: int = 4) -> vf.Environment:
    """Return a game with one row of the dataset for each number."""
    numbers = range(1, highest + 1)
    rows = [{"question": f"Guess a number from 1 to {highest}.", "answer": str(number)} for number in numbers]
    rubric = vf.Rubric(funcs=[guessed, is_number], weights=[1.0, 0.1])
    return GuessEnv(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)


def guessed(completion: vf.Messages, answer: str) -> float:
    """Return 1 for a right first guess, less for each guess before it, and 0 if the number was not guessed."""
    guesses = [_guess(message.content) for message in completion if message.role == "assistant"]
    return 1 / len(guesses) if guesses[-1] == int(answer) else 0.0


def is_number(completion: vf.Messages) -> float:
    """Return the share of answers that consist of a number alone."""
    answers = [message.content for message in completion if message.role == "assistant"]
    return sum(text.strip().isdecimal() for text in answers) / len(answers)


def _guess(answer: str) -> int | None:
    found = re.search(r"\d+", answer)
    return int(found[0]) if found else None
