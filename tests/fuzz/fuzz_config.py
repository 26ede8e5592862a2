"""Parse any bytes as a config file: a config, reported problems, or a ConfigError.

    python tests/fuzz config -runs=1000000        # coverage-guided, by atheris: pip install -e '.[fuzz]'

A config without problems must survive the TOML of a run directory and the JSON for workers. `seeds` are the shipped
examples; `DICTIONARY` has every key.
"""

from pathlib import Path
from typing import Any

from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec
from unstable_lite.config.reading import parse_config, parse_toml
from unstable_lite.config.section import Section
from unstable_lite.errors import ConfigError
from unstable_lite.tracking.run_directory import to_toml

EXAMPLES = Path(__file__).parents[2] / "examples"
VALUES = [
    "inf",
    "-inf",
    "nan",
    "true",
    "[]",
    "{}",
    "-1",
    "0",
    "9" * 30,
    "1979-05-27T07:32:00Z",
    '"\\u0000"',
    '"""',
    "[[",
]


def one_input(data: bytes) -> None:
    try:
        config, problems = parse_config(parse_toml(data, "fuzzed.toml"))
    except ConfigError:
        return
    assert config is not None or problems
    if config is None or problems:
        return
    plain = config.model_dump(mode="json")
    assert _same(Config.model_validate_json(config.model_dump_json()), plain)
    again, problems = parse_config(parse_toml(to_toml(plain).encode(), "config.toml"))
    assert problems == []
    assert again is not None
    assert _same(again, plain)


def _same(config: Config, plain: dict[str, Any]) -> bool:
    """Compare what is written, in which a date is text and nan is nan."""
    return repr(config.model_dump(mode="json")) == repr(plain)


def seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted(EXAMPLES.glob("*.toml"))]


def _keys() -> list[str]:
    sections = [
        info.annotation
        for info in Config.model_fields.values()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    ]
    names = [*Config.model_fields, *TrainEnvSpec.model_fields, *EvalEnvSpec.model_fields]
    return sorted({*names, *(name for section in sections for name in section.model_fields)})


DICTIONARY = [f"{key} = ".encode() for key in _keys()] + [f"[{key}]\n".encode() for key in Config.model_fields]
DICTIONARY += [value.encode() for value in VALUES]
