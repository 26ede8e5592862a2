"""Sections of envs, policies, opponents and prompts, and the names of players."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from unstable_lite.config.env_ids import canonical_env_id, is_judged
from unstable_lite.config.reference import from_reference
from unstable_lite.config.section import Section
from unstable_lite.config.training import LearnerConfig
from unstable_lite.types import BASE, Observation, Sampling

LEAST_TEMPERATURE = 0.01
"""Lowest temperature that engines sample at. vLLM raises lower ones to it, and at the very lowest all engines take the
most probable token and report its log-probability at temperature 1."""
_CUSTOM_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Z]\w*")
"""Name of a user's class: `my_module:MyPlayer`, but neither `vendor/model:free` nor `llama3:8b`."""


class PlayerName(NamedTuple):
    """A player's name, as configs and commands give it, taken apart; docs/opponents.md lists the players."""

    kind: Literal["base", "adapter", "run", "average", "policy", "scripted", "class", "remote"]
    rest: str
    """Text after `adapter:`, `run:`, `average:`, `policy:` or `scripted:`; for the other kinds the whole name."""

    @property
    def has_adapter(self) -> bool:
        """Whether the name is that of a frozen player with an adapter, or of an average of several."""
        return self.kind in ("adapter", "run", "average")

    @property
    def is_frozen(self) -> bool:
        return self.kind == "base" or self.has_adapter


def parse_player(name: str) -> PlayerName:
    """Take a player's name apart; every name is one. The words before a colon here are no modules of players."""
    word, colon, rest = name.partition(":")
    match word:
        case "adapter" | "run" | "average" | "policy" | "scripted" if colon:
            return PlayerName(word, rest)
    return PlayerName("base" if name == BASE else "class" if _CUSTOM_CLASS.fullmatch(name) else "remote", name)


def is_policy(name: str) -> bool:
    """Return whether the name is that of a policy of the run, `policy:NAME`, or of its checkpoints, with `/past`."""
    return parse_player(name).kind == "policy"


def _pairs(table: Any) -> Any:
    """Return a table as sorted pairs, which unlike a dict are hashable. Raises ValueError for other values.

    Pairs are accepted as a tuple, as `vars` of another spec has them.
    """
    try:
        table = dict(table) if isinstance(table, tuple) else table
    except (TypeError, ValueError):
        table = None
    if not isinstance(table, dict):
        raise ValueError("write a table: { name = value }")
    return tuple((name, _argument(name, value)) for name, value in sorted(table.items()))


def _argument(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_argument(name, item) for item in value)
    if not isinstance(value, str | int | float) or value in (math.inf, -math.inf) or value != value:
        shown = value if isinstance(value, float) else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {shown}; write a finite number, a string, a boolean or an array of them")
    return value


def _two_numbers(value: Any) -> Any:
    """Return a list of two whole numbers. Raises ValueError for any other value."""
    if isinstance(value, list | tuple) and [*map(type, value)] == [int, int]:
        return value
    raise ValueError("write [least, most], two whole numbers of updates")


def eval_temperature(value: float) -> float:
    """Return a temperature at which evaluations can sample. Raises ValueError for any other."""
    if value != 0 and not LEAST_TEMPERATURE <= value < math.inf:
        raise ValueError(f"give 0 (greedy) or a number from {LEAST_TEMPERATURE}, the lowest temperature of vLLM")
    return value


Keywords = Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_pairs), PlainSerializer(dict)]
"""Table of keyword arguments, as pairs of name and value."""


@from_reference()
class EnvSpec(Section):
    env_id: Annotated[str, AfterValidator(canonical_env_id)]
    """Id of a TextArena env; `module:id` of one that a custom module registers with TextArena; or a game of OpenSpiel,
    `openspiel:kuhn_poker` or with parameters `openspiel:liars_dice(dice_sides=3)`; or a file of questions with answers,
    `questions:PATH.jsonl`."""
    num_players: int
    """Number of seats of a game."""
    prompt_template: str = "default"
    """Template that makes a prompt of an observation: a built-in one, `chat`, or a name from `[templates]`."""
    action_extraction_fn: str = "default"
    """Function that extracts the action from an answer: the last `\\boxed{}`, in square brackets for games; `boxed`,
    its content alone, which `default` means for questions; `exact`, the action of `\\boxed{[action]}` if the answer is
    nothing else; or `module:function`."""
    max_turns: int = Field(200, ge=1)
    """Turn cap over all players; a game that reaches it is truncated."""
    observation: Observation = "env"
    """Text that a player sees: `env`, the game so far as the env id's own wrapper shows it; `first-last`, the first and
    the last message; `board`, the rules and the newest board, only for board games (docs/games.md)."""
    isolated: bool | None = None
    """Whether its games run in processes that can be killed wherever they hang; default: if the env is known to loop,
    its reset is slow, or its games depend on the hash seed. A turn then costs a round trip, 0.1 ms and more."""
    reward_scale: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Factor that makes rewards of the utilities of an OpenSpiel game; default: 1 / the largest size of a utility.
    Metrics show the utilities themselves. Not for other envs."""
    env_kwargs: Keywords = ()
    """Keyword arguments of the env's class, as a table: `{ num_rows = 5, num_cols = 6 }`. `check` names those that an
    env accepts. Not for OpenSpiel's games, whose parameters are part of `env_id`."""
    error_allowance: int = Field(0, ge=0)
    """Number of invalid moves in a row that a player may repeat before the env ends the game, or the player's part."""

    @property
    def extraction(self) -> str:
        """Name of the function that reads answers."""
        is_left_open = self.action_extraction_fn == "default" and is_judged(self.env_id)
        return "boxed" if is_left_open else self.action_extraction_fn


class TrainEnvSpec(EnvSpec):
    """An env to collect training games from."""

    num_actors: int
    """Number of seats of the current policy. If equal to `num_players`: mirror self-play, no opponent is sampled. With
    `seats` it may be left out."""
    fixed_opponents: tuple[str, ...] | None = None
    """Fixed opponents in this env. Default: `league.fixed_opponents`."""
    seats: tuple[str, ...] | None = None
    """Name of the policy at each seat, for games of roles in a run with `[policies]`. Default: the policy that a game
    is played for has `num_actors` random seats."""

    @model_validator(mode="before")
    @classmethod
    def _give_every_seat(cls, given: Any) -> Any:
        """Set `num_actors` if `seats` names a policy for every seat."""
        return {"num_actors": len(given["seats"])} | given if isinstance(given, dict) and given.get("seats") else given

    @property
    def num_drawn(self) -> int:
        """Number of seats whose players a sampler of opponents draws."""
        return 0 if self.seats else max(0, self.num_players - self.num_actors)


INHERITED = (
    *("prompt_template", "action_extraction_fn", "max_turns", "observation"),
    *("reward_scale", "env_kwargs", "error_allowance"),
)
"""Keys that an eval env takes over from the training env of the same id, so that a curve measures the trained game."""


class EvalEnvSpec(EnvSpec):
    """An env to evaluate on. One seat is the current policy's, the others are `fixed_opponent`'s.

    The default of `prompt_template`, `action_extraction_fn`, `max_turns`, `observation`, `reward_scale`, `env_kwargs`
    and `error_allowance` is the value of the training env of the same id, if there is one.
    """

    fixed_opponent: str = "google/gemini-2.0-flash-lite-001"
    """Opponent, named as in `league.fixed_opponents`; or `policy:NAME`, the newest adapter of a policy of `[policies]`,
    against which the others are evaluated."""
    temperature: Annotated[float, AfterValidator(eval_temperature)] | None = None
    """Sampling temperature of every seat that engines serve, at least 0.01, or 0: the most probable token. Default:
    `engine.temperature`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling threshold at the same seats. Default: `engine.top_p`."""

    @property
    def sampling(self) -> Sampling | None:
        """Sampling that differs from training's, if any."""
        if self.temperature is None and self.top_p is None:
            return None
        return Sampling(temperature=self.temperature, top_p=self.top_p)

    @property
    def opponent(self) -> str:
        """Name of the opponent in results, with the sampling if it has its own: `scripted:random, greedy`."""
        return opponent_shown(self.fixed_opponent if self.num_players > 1 else "none", self.sampling)

    def inheriting(self, train: TrainEnvSpec | None) -> EvalEnvSpec:
        """Return a copy with the training env's value of every key in `INHERITED` that was not set."""
        left_open = set(INHERITED) - self.model_fields_set if train is not None else set()
        return self.changed(**{key: getattr(train, key) for key in left_open})


def evaluated_against(train: TrainEnvSpec, opponent: str) -> EvalEnvSpec:
    """Return the eval env in which the games of a training env are played against an opponent."""
    return EvalEnvSpec(fixed_opponent=opponent, **train.model_dump(exclude={"num_actors", "fixed_opponents", "seats"}))


def opponent_shown(name: str, sampling: Sampling | None) -> str:
    """Return the opponent's name in results, with the sampling if an env has its own."""
    return name if sampling is None else f"{name}, {sampling}"


def against(opponent: str) -> str:
    """Return the end of a title that names the opponent in results; if there is none, only the sampling."""
    name, comma, sampling = opponent.partition(", ")
    return f"{comma}{sampling}" if name == "none" else f" against {opponent}"


class LeagueConfig(Section):
    env_sampling_strategy: str | dict[str, Any] = "random"
    """`random`, `weighted`, `round-robin`, `learning-progress`, or `module:Class`; with options as a table of one
    name: `{ weighted = { weights = { "Nim-v0-train" = 2, "KuhnPoker-v0-train" = 1 } } }`."""
    opponent_sampling_strategy: str | dict[str, Any] = "none"
    """`none`, `mirror`, `fixed`, `lagged`, `uniform`, `random`, `match-quality`, `ts-dist`, `ts-dist-biased`, `pfsp`,
    `module:Class`, or a mixture: `{ mirror = 0.6, fixed = 0.1, pfsp = { weight = 0.3, weighting = "even" } }`.
    docs/league.md describes each of them and its options. `random` and those after it draw fixed opponents too.
    """
    shares_by: Literal["games", "steps"] = "games"
    """Unit in which samplers' shares of envs and opponents are counted: games, or the steps that are trained on. With
    `steps`, any sampler plays a game that brings more steps (a long one, or self-play, which trains both seats)
    proportionally less often."""
    fixed_opponents: tuple[str, ...] = ("google/gemini-2.0-flash-lite-001",)
    """Players that do not change (docs/opponents.md): `scripted:random` and other scripted players; the frozen players
    `base`, `adapter:DIRECTORY`, `run:DIRECTORY/ckpt-N`, `run:DIRECTORY/best`, `run:DIRECTORY/newest` and
    `average:DIRECTORY`; custom classes as `module:Class`; models behind the endpoint of section `opponents`."""
    opponent_lag: Annotated[tuple[int, int], BeforeValidator(_two_numbers)] = (1, 7)
    """Smallest and largest number of updates by which an opponent checkpoint may lag behind."""
    max_active_checkpoints: int | None = Field(None, ge=1)
    """Number of a policy's checkpoints that can be played at once, the current one included; each needs an adapter
    slot. Default: 1 if no strategy draws older ones; all that `opponent_lag` allows for `lagged`; else as many of them
    as fit."""
    active_checkpoints_by: Literal["recency", "match-quality", "nearest-rating"] = "recency"
    """Choice of these checkpoints if there are more: the newest, those of the best TrueSkill match quality, or those of
    the nearest μ."""
    keep_checkpoints: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Updates whose adapters stay on disk forever, in `adapters/` of the run directory, and may be opponents at any
    age. Others stay while they may be opponents."""
    keep_every: int | None = Field(None, ge=1)
    """Interval k: the adapter of every k-th update is kept in the same way."""
    adapter_policy: Literal["game", "turn"] = "game"
    """Adapter that plays the seats of the current policy in a training game: `game`, the one that was current when the
    game began; `turn`, for each turn the newest, so that long games hold no adapter slots (docs/league.md). Not with
    `run.group_size` above 1, nor with an algorithm that learns from episodes."""

    def opponents_in(self, env: TrainEnvSpec) -> tuple[str, ...]:
        """Return the fixed opponents that the strategy may draw in a training env."""
        return self.fixed_opponents if env.fixed_opponents is None else env.fixed_opponents


OF_POLICY = (
    *("batch_size", "learning_rate", "learning_rate_schedule", "learning_rate_warmup", "weight_decay"),
    *("gradient_clipping", "importance_weight_cap", "importance_weight_mode", "importance_weight_level"),
    *("kl_coefficient", "kl_reference", "kl_average_decay", "entropy_coefficient", "entropy_target"),
    *("coefficient_schedule", "critic_learning_rate", "critic_warmup_updates", "gamma", "gae_lambda", "normalize_adv"),
    *("ppo_epochs", "ppo_minibatches", "clip_range", "clip_range_high", "options"),
)
"""Keys of section `learner` that a policy may set: those of its loss and its optimiser."""


def _of_policy(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with the values that section `learner` makes of them. Raises ValueError for any other key."""
    if others := sorted(table.keys() - set(OF_POLICY)):
        raise ValueError(f"{', '.join(others)} cannot differ among policies; these keys can: {', '.join(OF_POLICY)}")
    section = LearnerConfig.model_validate(table)
    return {key: getattr(section, key) for key in table}


class RestartConfig(Section):
    """Rule by which a policy begins again, as a new lineage."""

    start: str = Field("base", alias="from")
    """Adapter of a new lineage: `base`, a fresh one; `initial`, that of `lora.initial_lora_path`, if there is one; or
    the newest adapter of another policy, by its name."""
    at_points: float | None = Field(None, gt=0, lt=1)
    """Points in its newest `games` training games against the policies or the population in its `opponents` after which
    the lineage ends, if the lower end of their 95 % interval is above. Default: points do not end it."""
    games: int = Field(200, ge=20)
    """Number of these games, without void ones."""
    at_updates: int | None = Field(None, ge=1)
    """Number of updates of a lineage after which it ends in any case. Default: no number."""
    keeps: bool = True
    """Whether the last checkpoint of a lineage stays a player, if some `opponents` draw `population`."""


class PolicyConfig(Section):
    """`[policies.NAME]`: one of several policies that learn together on one base and play each other.

    Without such a section a run has one policy.
    """

    opponents: str | dict[str, Any] | None = None
    """`league.opponent_sampling_strategy` of this policy, which may also name `policy:NAME`, the newest adapter of
    another one, `policy:NAME/past`, one of its active checkpoints, and `population`, the last checkpoints of lineages
    that were kept. Default: that of section `league`."""
    share: float | None = Field(None, gt=0, lt=1)
    """Share of the updates. Default: the rest, divided equally among the policies without a share."""
    algorithm: str | None = None
    """Algorithm of this policy. Default: the run's."""
    restart: RestartConfig | None = None
    """Rule by which the policy begins again. Default: it never does."""
    learner: Annotated[dict[str, Any], AfterValidator(_of_policy)] = {}  # noqa: RUF012 (pydantic copies it)
    """Keys of section `learner` that differ for this policy: those of its loss and optimiser."""


class OpponentsConfig(Section):
    """Opponents behind an OpenAI-compatible endpoint.

    The key comes from the environment: OPENROUTER_API_KEY for OpenRouter, OPENAI_API_KEY for any other endpoint; a
    server on this machine needs none.
    """

    base_url: str | None = None
    """URL of the endpoint. Default: the environment's OPENAI_BASE_URL, else OpenRouter."""
    timeout_s: float = Field(120.0, gt=0)
    """Time limit of one attempt."""
    max_concurrent_requests: int = Field(32, ge=1)
    """Most requests in flight at once over all games; further ones wait."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. Default: the endpoint's."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of one answer. Default: the endpoint's."""
    max_requests: int | None = Field(None, ge=1)
    """Most requests. When this limit or the next one is reached, games against these opponents end (those in
    flight are void); the run continues with other games, or ends if there are none."""
    max_total_tokens: int | None = Field(None, ge=1)
    """Most tokens of prompts and answers together."""


class TemplateConfig(Section):
    """Custom prompt template, used by its name in any `prompt_template`.

    `{observation}` occurs once, in `user`; `{game}`, anywhere, becomes a sentence that names the kind of game for the
    number of players. Other braces, as in `\\boxed{}`, are left unchanged.
    """

    user: str
    """User message, which contains `{observation}`."""
    system: str = ""
    """Text before the user message."""
    assistant: str = ""
    """Beginning of the answer, for example `<think>`."""
    chat: bool = False
    """Whether the tokenizer's own chat template puts its markup around system and user; if not, the prompt is the three
    texts joined without change."""
    thinking: bool = True
    """Value of `enable_thinking` and `thinking` for the tokenizer's chat template, with `chat`."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end the answer, besides the model's end tokens and, with `chat`, the markup that closes a turn."""
    zero_sum: bool = False
    """Whether `{game}` calls games of several players zero-sum."""
    think: tuple[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] | None = None
    """Texts that open and close a thought, for example `["<think>", "</think>"]`. Default: those of the model, if its
    tokenizer or chat template has tags that are known (Qwen, DeepSeek, Magistral, Harmony and others)."""
