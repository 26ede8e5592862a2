"""The fuzz targets on a few hundred mutated seeds; `python tests/fuzz` tries more."""

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fuzz_codec
import fuzz_config
from unstable_lite.config.reading import parse_config, parse_toml, read_config
from unstable_lite.errors import ConfigError
from unstable_lite.planning.validation import find_problems

pytestmark = pytest.mark.nightly
CASES = 500


def _mutated(seeds: list[bytes], dictionary: list[bytes], chance: random.Random) -> bytes:
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                data[at:at] = chance.choice(dictionary)
            case 2:
                word = chance.choice(dictionary)
                data[at : at + len(word)] = word
            case 3:
                del data[at : at + chance.choice([1, 1, 4, 64])]
            case 4:
                other = chance.choice(seeds)
                start = chance.randrange(len(other))
                data[at:at] = other[start : start + chance.randrange(64)]
    return bytes(data)


@pytest.mark.parametrize("target", [fuzz_codec, fuzz_config], ids=["codec", "config"])
def test_mutated_seeds_are_accepted_whole_or_refused(target: ModuleType) -> None:
    seeds, chance = target.seeds(), random.Random(2011)
    for seed in seeds:
        target.one_input(seed)
    for _ in range(CASES):
        data = _mutated(seeds, target.DICTIONARY, chance)
        try:
            target.one_input(data)
        except Exception as error:
            raise AssertionError(f"{data!r}") from error


ENV = '[[train_envs]]\nenv_id = "Nim-v0-train"\nnum_players = 2\nnum_actors = 2\n'
STRATEGY = "[league]\nopponent_sampling_strategy = "


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("x = " + "[" * 5000, "nested", id="lists nested deeper than Python goes"),
        pytest.param("a." * 3000 + "a = 1", "16", id="tables nested deeper than Python goes"),
        pytest.param(f"{STRATEGY}{{ {'a.' * 300}a = 1 }}", "16", id="tables deeper than JSON goes"),
        pytest.param("[run]\nseed = " + "9" * 5000, "not TOML", id="a number of more digits than Python reads"),
        pytest.param("[run]\nseed = 0x" + "f" * 4000, "16000", id="a number of more digits than Python writes"),
        pytest.param("[run]\nseed = 9223372036854775808", "64 bits", id="a number over 64 bits"),
        pytest.param(f"{STRATEGY}{{ pfsp = {{ weight = inf }} }}", None, id="inf in a free-form value"),
        pytest.param(f"{STRATEGY}{{ pfsp = {{ weight = nan }} }}", None, id="nan in a free-form value"),
        pytest.param(f"{STRATEGY}{{ since = 1979-05-27 }}", None, id="a date in a free-form value"),
        pytest.param(f'{STRATEGY}{{ "a b" = [{{ "" = 1 }}] }}', None, id="keys that need quotes in a list of tables"),
        pytest.param('[run]\nname = "\\u007f\\u0000\\u0085"', None, id="control characters"),
    ],
)
def test_inputs_that_once_broke_config_loading_are_handled(text: str, says: str | None) -> None:
    data = f"{text}\n{ENV}".encode()
    fuzz_config.one_input(data)
    if says is None:
        assert parse_config(parse_toml(data, "x"))[1] == []
    else:
        with pytest.raises(ConfigError, match=says):
            parse_config(parse_toml(data, "x"))


ODD = (
    "",
    "\0",
    "x" * 5000,
    "..",
    "/",
    ":",
    "x:",
    "..:A",
    ".a:B",
    "a..b:C",
    "~no-such-user/x",
    "http://[",
    "/proc/self/mem",
    "🜁",
)
PLACES = (
    "model_name", "algorithm", "run.name", "run.output_dir", "engine.kind", "lora.initial_lora_path",
    "lora.initial_critic_path", "league.env_sampling_strategy", "league.opponent_sampling_strategy",
    "league.fixed_opponents.0", "opponents.base_url", "rewards.final_reward_transformation.0", "train_envs.0.env_id",
    "train_envs.0.prompt_template", "train_envs.0.action_extraction_fn", "eval_envs.0.fixed_opponent",
    "templates.mine.user", "sft.data", "sft.output",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_odd_text_in_any_place_never_crashes(place: str) -> None:
    for odd in ODD:
        raw: dict[str, Any] = {
            "engine": {"kind": "scripted"},
            "league": {"opponent_sampling_strategy": "fixed", "fixed_opponents": ["scripted:random"]},
            "rewards": {"final_reward_transformation": [""]},
            "templates": {"mine": {"user": "{observation}"}},
            "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1}],
            "eval_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "fixed_opponent": "scripted:random"}],
        }
        *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
        table: Any = raw
        for part in path:
            table = table[part] if isinstance(part, int) else table.setdefault(part, {})
        table[last] = odd
        config, problems = parse_config(raw)
        problems += find_problems(config) if config is not None else []
        assert all(isinstance(problem, str) for problem in problems)


@pytest.mark.parametrize(
    "override", ["a." * 3000 + "b=1", "run.seed=" + "9" * 5000, "x=" + "[" * 5000, "run.seed=\ud800"]
)
def test_override_is_checked_in_the_same_way(override: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(ENV)
    try:
        assert read_config(path, (override,))[1]
    except ConfigError as error:
        assert str(path) in str(error)
