"""Command `new`: write an example, so that an installed package needs no clone."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Annotated

import typer

from unstable_lite.cli.options import Debug, console, errors_as_messages
from unstable_lite.errors import ConfigError, UnstableError

EXAMPLES = {
    "quickstart": ("quickstart.toml",),
    "connect-four": ("connect_four.toml",),
    "liars-dice": ("liars_dice.toml",),
    "kuhn": ("kuhn.toml",),
    "a2c": ("a2c.toml",),
    "league": ("league.toml",),
    "exploiter": ("exploiter.toml",),
    "exploitability": ("exploitability_of_a_model.toml",),
    "warm-start": ("warm_start.toml",),
    "questions": ("questions.toml", "arithmetic.jsonl"),
    "branching": ("branching.toml", "branching.py"),
    "gpu": ("selfplay_24gb.toml",),
    "gpus": ("selfplay_gpu.toml",),
    "game": ("custom_env.toml", "custom_env.py"),
    "algorithm": ("custom_algorithm.toml", "custom_algorithm.py"),
    "reward": ("custom_reward_transformation.toml", "custom_reward_transformation.py"),
    "opponent": ("custom_opponent.toml", "custom_opponent.py"),
    "verifiers": ("verifiers.toml", "verifiers_env.py", "verifiers_guess.py"),
}
"""Files of each example: a config, whose first line describes it, and the files that the config names."""
SCRIPT = "unstable-lite"


def new(
    name: Annotated[str | None, typer.Argument(help="Name of the example; without it, all are listed.")] = None,
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Existing or new directory.")] = Path(),
    debug: Debug = False,
) -> None:
    """Write an example: a commented config, and the module or data that it names."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.terminal import key_value_lines

        out = console()
        if name is None:
            out.print(key_value_lines((name, describe(name)) for name in EXAMPLES), soft_wrap=True)
            out.print("\nto write one into DIR: unstable-lite new NAME DIR")
            return
        for path in write(name, directory):
            out.print(f"wrote {path}", soft_wrap=True)
        if directory != Path():
            out.print(f"cd {shlex.quote(str(directory))}", soft_wrap=True)
        out.print("\n".join(commands(name)), soft_wrap=True, markup=False)


def describe(name: str) -> str:
    """Return the first line of the example's config."""
    with (_source() / EXAMPLES[name][0]).open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").rstrip()


def commands(name: str) -> list[str]:
    """Return the commands that the config names first, such as an installation, and those that check and run it."""
    config = EXAMPLES[name][0]
    with (_source() / config).open(encoding="utf-8") as file:
        first = list(itertools.takewhile(lambda line: line.startswith("#"), file))
    named = [line[4:].strip().replace("python -m unstable_lite", SCRIPT) for line in first if line.startswith("#   ")]
    is_whole = any(line.startswith((f"{SCRIPT} run", f"{SCRIPT} eval")) for line in named)
    return named if is_whole else [*named, f"{SCRIPT} check {config}", f"{SCRIPT} run {config}"]


def write(name: str, directory: Path) -> list[Path]:
    """Write the files of an example into `directory` and return their paths.

    Raises ConfigError for an unknown name. Raises UnstableError if one of the files exists, in which case none is
    written, or if one cannot be written.
    """
    if name not in EXAMPLES:
        raise ConfigError(f"there is no example {name!r}; choose one of {', '.join(EXAMPLES)}")
    paths = [directory / file for file in EXAMPLES[name]]
    try:
        for path in paths:
            if path.exists():
                raise UnstableError(f"{path} exists already, so nothing was written; name another directory")
        directory.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with path.open("xb") as file:
                file.write((_source() / path.name).read_bytes())
    except OSError as error:
        why = "it is a file" if directory.is_file() else error.strerror
        raise UnstableError(f"cannot write to {directory}: {why}; name another directory") from error
    return paths


def _source() -> Path:
    """Return the folder of the examples, which a built package contains, and which lies beside it in a clone."""
    package = Path(__file__).parents[1]
    return packed if (packed := package / "examples").is_dir() else package.parent / "examples"
