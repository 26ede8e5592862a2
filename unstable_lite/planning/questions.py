"""Files of questions in a config: their rows in `check`, and the check that a resumed run asks the same questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_questions, questions_path, slug
from unstable_lite.errors import ConfigError
from unstable_lite.games.questions.reader import Questions, read_questions


def _env_ids(config: Config) -> list[str]:
    return [*filter(is_questions, dict.fromkeys(spec.env_id for spec in (*config.train_envs, *config.eval_envs)))]


def question_files(config: Config) -> dict[str, Questions]:
    """Return each file of questions, by env id. Raises ConfigError for a file that cannot be used."""
    return {env_id: read_questions(env_id) for env_id in _env_ids(config)}


def question_problems(config: Config) -> Iterator[str]:
    """Yield each pair of files that metrics could not distinguish."""
    first: dict[str, str] = {}
    for env_id in _env_ids(config):
        if (other := first.setdefault(slug(env_id), env_id)) != env_id:
            yield f"{other} and {env_id} have one name in metrics, {slug(env_id)}; rename one of the files"


def describe_questions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a row (name, description) with the number of questions of each file."""
    for env_id, questions in question_files(config).items():
        total, games = len(questions.items), config.run.eval_games
        asked = f"; {games} games of an evaluation ask " + ("all" if games >= total else f"the first {games}")
        is_asked = games and any(env.env_id == env_id for env in config.eval_envs)
        yield "questions", f"{total} in {questions_path(env_id)}" + asked * bool(is_asked)


def changed_questions(config: Config, recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each file whose SHA-256 is not the recorded one. `recorded`: by env id."""
    try:
        files = question_files(config)
    except ConfigError:  # reported with the other problems of the config
        return
    for env_id, questions in files.items():
        if recorded.get(env_id, questions.sha256) != questions.sha256:
            yield (
                f"{questions_path(env_id)} changed since the run began: its SHA-256 is {questions.sha256[:16]}…, and "
                f"the run recorded {recorded[env_id][:16]}…. Restore the file, or start a new run"
            )
