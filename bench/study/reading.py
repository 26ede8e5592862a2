"""Read a study file: its arms become configs, each checked as `check` does before the first run starts."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, parse_player
from unstable_lite.config.reading import parse_config, parse_toml, read_toml
from unstable_lite.config.section import Section
from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.planning.envs import exact_envs
from unstable_lite.planning.plan import make_plan
from unstable_lite.types import BASE

AVERAGE = "exploitability_average"
"""Kind of measure that is computed from the checkpoints after a run."""
EXPLOITER = "exploiter"
"""Kind of measures that are computed from an exploiter and its one opponent after a run."""
STATE_DEPENDENCE = "state_dependence"
LANGUAGE = "language"
"""Kinds of measures that are computed after a run from its start and its last checkpoint."""
LANGUAGE_VALUES = ("answers", "kl", "of_base")
EXPLOITER_VALUES = ("learned", "exact", "missed", "untrained")
TARGET = "target:"
"""Start of the name of an opponent that is a checkpoint of a target's run."""
OWN_KEYS = ("seed", "name", "output_dir")
"""Keys of section `run` that the study sets."""
FOR_A_CLAIM = 5
"""Fewest seeds that can support a claim."""


class Measure(Section):
    """One number of a run, from a metric or from evaluations against one opponent."""

    metric: str | None = None
    """Metric of metrics.jsonl, such as `exploitability/openspiel:kuhn_poker`; or `exploitability_average/ENV`, of the
    policy that draws one of the run's checkpoints before each game; `exploiter/` and one of `EXPLOITER_VALUES`;
    `state_dependence/ENV`; or `language/` and one of `LANGUAGE_VALUES`."""
    opponent: str | None = None
    """Opponent of an eval env, instead of a metric."""
    env_id: str | None = None
    """Env of that opponent. Default: the only eval env with it."""
    value: Literal["points", "win_rate", "mean_reward"] = "points"
    """Result of its evaluations to read."""
    take: Literal["last", "mean", "min", "max", "change"] = "last"
    of: Literal["all", "last-half"] = "all"
    """Updates to take it of. Update 0, before training, counts for `change` alone: the last value less this one."""

    @property
    def series(self) -> str:
        """Name of the curve that it reads."""
        return self.metric or series_of(self.value, self.opponent, self.env_id)


class Arm(Section):
    name: Annotated[str, Field(min_length=1, max_length=60)]
    overrides: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Config sections, whose keys replace those of the base. A value that is a list or table is replaced as a whole."""
    seed_offset: int = Field(0, ge=0, lt=1 << 31)
    """Number added to every seed, for an arm that repeats another one with other seeds (A/A)."""

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.]+", "-", self.name).strip("-")


class Study(Section):
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    question: str
    primary: str
    """Measure that answers the question, named before the runs."""
    base: str | dict[str, Any]
    """Path of a config, relative to the study file, or the sections themselves."""
    overrides: dict[str, Any] = {}  # noqa: RUF012
    """Sections that replace those of the base in every arm."""
    warm_start: bool = False
    """Train an adapter by imitation before the runs that start from it, with section `sft`: one for all arms that agree
    in model, `sft`, `lora`, `templates` and training envs."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], Field(min_length=1)]
    targets: tuple[Arm, ...] = ()
    """Runs that are made before the arms, with each seed, and are no results. `target:NAME/ckpt-N` as an arm's fixed
    opponent is that checkpoint of the target's run with the arm's seed."""
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    """The first arm is the one with which the others are compared."""
    measures: dict[str, Measure] = {}  # noqa: RUF012
    """Measures by name. Default: the last points against each opponent, and of each exploitability the last value, the
    worst of the last half, and the mean."""
    pools: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = {}  # noqa: RUF012
    """Arms that one more row of the table has together, by the name of the row."""
    scatter: tuple[str, str] | None = None
    """Two measures to plot against each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A study that can run."""

    study: Study
    """The file, with the env of every measure."""
    configs: Mapping[str, Config]
    """Effective config by arm or target; the study sets `OWN_KEYS` for each run. A checkpoint of a target has a digest
    of the target in its name, so an arm whose target is changed is changed, too."""


def read_study(path: Path) -> Checked:
    """Read and check a study file. Raises ConfigError with every problem of one kind at once."""
    study = _parsed(path)
    problems = list(_name_problems(study))
    base = _base(path, study)
    configs: dict[str, Config] = {}
    for arm in (*study.targets, *study.arms):
        where = f"arm {arm.name!r}"
        try:
            raw = merged(base, study.overrides, arm.overrides)
            config, wrong = parse_config(raw)
            if config is not None and not wrong:
                playable = {} if arm in study.targets else configs
                config = with_targets(config, partial(_with_digest, study=study, base=base, configs=playable))
                make_plan(with_targets(config, lambda _: BASE))  # of which no check reads files
                configs[arm.name] = config
                if study.warm_start and config.lora.initial_lora_path is not None:
                    wrong = ["remove lora.initial_lora_path, or warm_start, which sets it"]
        except ConfigError as error:
            wrong = list(error.problems)
        problems += [f"{where}: {problem}" for problem in wrong]
        set_by_study = [key for table in (study.overrides, arm.overrides) for key in OWN_KEYS if key in _run(table)]
        problems += [f"{where}: remove run.{key}, which the study sets" for key in dict.fromkeys(set_by_study)]
    if not problems:
        measures, problems = _measures(study, {arm.name: configs[arm.name] for arm in study.arms})
        study = study.model_copy(update={"measures": measures})
        named = {"primary": [study.primary], "scatter": study.scatter or ()}
        for key, names in named.items():
            problems += [
                f"{key} = {name!r} is not a measure{_hint(name, measures)}" for name in names if name not in measures
            ]
    if problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    return Checked(study=study, configs=configs)


def merged(base: Mapping[str, Any], *overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of each section replaced by those of `overrides`, the last one first."""
    result = dict(base)
    for table in overrides:
        for name, section in table.items():
            both = isinstance(section, dict) and isinstance(result.get(name), dict)
            result[name] = {**result[name], **section} if both else section
    return result


def with_targets(config: Config, name_of: Callable[[str], str]) -> Config:
    """Return the config with other names of its opponents that are checkpoints of targets."""
    names = tuple(name_of(name) if name.startswith(TARGET) else name for name in config.league.fixed_opponents)
    return config.changed(league={"fixed_opponents": names})


def target_of(name: str, study: Study) -> Arm:
    """Return the target of `target:NAME/ckpt-N` or `target:NAME/DIGEST/ckpt-N`. Raises ConfigError if none has it."""
    targets = {target.name: target for target in study.targets}
    wanted = name.removeprefix(TARGET).partition("/")[0]
    if wanted not in targets:
        raise ConfigError(f"{name!r} names no target{_hint(wanted, targets)}")
    return targets[wanted]


def digest(config: Config) -> str:
    """Return a digest of the config without the keys that the study sets."""
    return digest_of(as_stored(config))


def as_stored(config: Config) -> dict[str, Any]:
    raw = config.model_dump(mode="json")
    return {**raw, "run": {key: value for key, value in raw["run"].items() if key not in OWN_KEYS}}


def warm_start_digest(config: Config) -> str:
    """Return a digest of everything that an arm's warm start depends on."""
    raw = config.model_dump(mode="json", include={"model_name", "sft", "lora", "train_envs", "templates"})
    return digest_of(raw)[:8]


def digest_of(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()


def series_of(value: str, opponent: str | None, env_id: str | None) -> str:
    return f"{value} against {opponent} in {env_id}"


def _parsed(path: Path) -> Study:
    raw = read_toml(path)
    try:
        return Study.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(*(f"{path}: {_say(detail)}" for detail in error.errors(include_url=False))) from None


def _with_digest(name: str, study: Study, base: dict[str, Any], configs: Mapping[str, Config]) -> str:
    """Return a target's checkpoint with a digest of the target's part of the file. Raises ConfigError without it."""
    target = target_of(name, study)
    if (config := configs.get(target.name)) is None:
        raise ConfigError(f"{name!r}: this target cannot run, or is to be played by another target")
    run, update = config.run, name.rpartition("/ckpt-")[2]
    saved = [str(step) for step in range(1, run.learning_steps) if step % run.checkpoint_every == 0]
    if update not in (*saved, str(run.learning_steps)):
        raise ConfigError(f"{name!r}: the target's checkpoints are {', '.join([*saved, str(run.learning_steps)])}")
    own = digest_of({**merged(base, study.overrides, target.overrides), "seed_offset": target.seed_offset})
    return f"{TARGET}{target.name}/{own[:8]}/ckpt-{update}"


def _say(detail: Any) -> str:
    location = [part for part in detail["loc"] if not (part == "str" or "[" in str(part))]
    key, models = ".".join(map(str, location)), dict[str, type[Section]](arms=Arm, targets=Arm, measures=Measure)
    if detail["type"] == "extra_forbidden":
        known = models.get(location[0], Study) if len(location) > 1 else Study
        return f"unknown key {key!r}{_hint(str(location[-1]), known.model_fields)}"
    if detail["type"] == "missing":
        return f"{key!r} is missing"
    return f"{key} = {detail['input']!r}: {detail['msg']}"


def _hint(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _base(path: Path, study: Study) -> dict[str, Any]:
    if isinstance(study.base, dict):
        return study.base
    base = path.parent / study.base
    try:
        raw = parse_toml(base.read_bytes(), str(base))
    except OSError as error:
        raise ConfigError(f"{path}: base = {study.base!r}: {base} cannot be read: {error.strerror}") from error
    for key in OWN_KEYS:
        _run(raw).pop(key, None)
    return raw


def _run(table: dict[str, Any]) -> dict[str, Any]:
    run = table.get("run", {})
    return run if isinstance(run, dict) else {}


def _name_problems(study: Study) -> Iterator[str]:
    for key, names in {"seeds": study.seeds, "arms": [arm.slug for arm in (*study.targets, *study.arms)]}.items():
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield f"{key}: {name!r} occurs twice"
    known = {arm.name: arm for arm in study.arms}
    for pool, names in study.pools.items():
        yield from (f"pools.{pool}: {name!r} is not an arm{_hint(name, known)}" for name in names if name not in known)


def _measures(study: Study, configs: Mapping[str, Config]) -> tuple[dict[str, Measure], list[str]]:
    """Return the measures with their envs, and the problems of those that some arm does not have."""
    first = configs[study.arms[0].name]
    measures, problems = dict(study.measures) or dict(_default_measures(first)), list[str]()
    for name, measure in measures.items():
        where = f"measures.{name}"
        if (measure.metric is None) == (measure.opponent is None):
            problems.append(f"{where}: set either metric or opponent")
            continue
        if measure.opponent is not None and measure.env_id is None:
            found = [env.env_id for env in first.eval_envs if env.opponent == measure.opponent]
            if len(found) > 1:
                problems.append(f"{where}: several eval envs have {measure.opponent!r}; set env_id: {', '.join(found)}")
                continue
            measures[name] = measure = measure.model_copy(update={"env_id": next(iter(found), None)})
        for arm, config in configs.items():
            known = _known_series(config, measure)
            if known is not None and measure.series not in known:
                problems.append(
                    f"{where}: arm {arm!r} has no {measure.series}{_hint(measure.series, dict.fromkeys(known))}"
                )
    if not measures:
        problems.append("measures: the first arm has neither eval envs nor run.exact_every; set one of them")
    return measures, problems


def _known_series(config: Config, measure: Measure) -> list[str] | None:
    """Return all series of the kind of a measure; None if they cannot be known before a run."""
    has_main = not config.policies or "main" in config.policies
    if measure.opponent is not None:
        has_games = config.run.eval_games > 0 and has_main
        return [series_of(measure.value, env.opponent, env.env_id) for env in _of_main(config) if has_games]
    metric = str(measure.metric)
    policy, _, rest = metric.partition("/")
    kind = (rest if policy in config.policies else metric).partition("/")[0]
    if kind == EXPLOITER:
        opponents = config.league.fixed_opponents
        has_policy = [
            parse_player(n).has_adapter or n.startswith(TARGET) or n in (BASE, "scripted:random") for n in opponents
        ]
        has_one = len(config.train_envs) == 1 and has_policy == [True]
        return [f"{EXPLOITER}/{value}" for value in EXPLOITER_VALUES if has_one]
    if kind == LANGUAGE:
        return [f"{LANGUAGE}/{value}" for value in LANGUAGE_VALUES]
    if kind in ("exploitability", "exploitability_legal"):
        of_seats = [(env.env_id, getattr(env, "seats", None)) for env in exact_envs(config)[0]]
        names = [(name, env) for name in config.shares for env, seats in of_seats if not seats or name in seats]
        return [f"{name}/{kind}/{env}".removeprefix("/") for name, env in names]
    if kind in (AVERAGE, STATE_DEPENDENCE):  # of one policy, at all seats
        envs = [env for env in exact_envs(config)[0] if getattr(env, "seats", None) is None and has_main]
        # The average is defined only where each history has its own positions.
        return [f"{kind}/{env.env_id}" for env in envs if kind != AVERAGE or not flatten(env.env_id).shares_positions]
    return None


def _of_main(config: Config) -> Sequence[EvalEnvSpec]:
    """Return the eval envs of which a study reads the points: those of the policy `main`."""
    return config.of_policy("main").eval_envs if "main" in config.policies else config.eval_envs


def _default_measures(config: Config) -> Iterator[tuple[str, Measure]]:
    for env in exact_envs(config)[0]:
        metric = f"{'main/' * bool(config.policies)}exploitability/{env.env_id}"
        yield f"{metric}, last", Measure(metric=metric)
        yield f"{metric}, worst of the last half", Measure(metric=metric, take="max", of="last-half")
        yield f"{metric}, mean", Measure(metric=metric, take="mean")
    for spec in _of_main(config) if config.run.eval_games else ():
        measure = Measure(opponent=spec.opponent, env_id=spec.env_id)
        yield f"{measure.series}, last", measure
