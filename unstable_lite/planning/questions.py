"""Files of questions in a config: their rows in `check`, and the check that a resumed run asks the same questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_questions, questions_path, slug
from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.games.questions.reader import read_questions


def question_ids(config: Config) -> list[str]:
    """Return the env ids of files of questions, each once."""
    specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
    return [env_id for env_id in dict.fromkeys(spec.env_id for spec in specs) if is_questions(env_id)]


def question_problems(config: Config) -> Iterator[str]:
    """Yield each pair of files that metrics could not distinguish."""
    known: dict[str, str] = {}
    for env_id in question_ids(config):
        if (other := known.setdefault(slug(env_id), env_id)) != env_id:
            yield f"{other} and {env_id} have one name in metrics, {slug(env_id)}; rename one of the files"


def describe_questions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a row (name, description) with the number of questions of each file. The files were read before."""
    for env_id in question_ids(config):
        total, games = len(read_questions(env_id).items), config.run.eval_games
        asked = "no evaluation asks them"
        if env_id in {env.env_id for env in config.eval_envs} and games:
            asked = f"an evaluation asks the first {games}" if games < total else f"an evaluation asks all {total}"
            asked += f", in {games} games" * (games > total)
        yield "questions", f"{questions_path(env_id)}: {total}; {asked}"


def digests(config: Config) -> dict[str, str]:
    """Return the SHA-256 of each file of questions, by env id. Raises ConfigError for a file that cannot be used."""
    return {env_id: read_questions(env_id).sha256 for env_id in question_ids(config)}


def changed_questions(config: Config, recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each file that is not the one that the run recorded. `recorded`: as of `digests`."""
    for env_id in question_ids(config):
        try:
            now = read_questions(env_id).sha256
        except ConfigError:  # reported with the other problems of the config
            continue
        if (before := recorded.get(env_id, now)) != now:
            yield (
                f"{questions_path(env_id)} changed since the run began: its SHA-256 is {now[:16]}…, and the run "
                f"recorded {before[:16]}…. Restore the file, or start a new run"
            )
