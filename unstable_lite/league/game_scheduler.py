"""Choose the players and the env of the next game.

Hands out a GameSpec and takes back a GameRecord. Knows nothing of engines, prompts or tensors.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from unstable_lite.adapters.frozen import drawn_member, members
from unstable_lite.config.env_ids import content_file
from unstable_lite.config.games import EnvSpec, EvalEnvSpec, TrainEnvSpec, parse_player
from unstable_lite.config.reference import from_reference
from unstable_lite.errors import ConfigError, OpponentError
from unstable_lite.league.samplers.env_samplers import BaseEnvSampler
from unstable_lite.league.samplers.model_samplers import BaseModelSampler, tell_result
from unstable_lite.plugins import interface_problems, lasting
from unstable_lite.rng import derive_seed, game_seed, question_seed, restore, state_of
from unstable_lite.types import AgentSpec, GameKind, GameRecord, GameSpec, ModelRef, uid_of

DRAWS = 20
"""Most opponents drawn for one seat until one can play, and most games drawn until one is kept by its steps."""
ENV_DRAWS = 1000
"""Most envs drawn for one game until one has a seat for a policy that lacks steps."""
GAMES = 256
"""Number of games in the running mean of the steps of a kind of game."""

STATE = ("kind", "update", "state_dict", "load_state_dict")


def _any_model(_model: ModelRef) -> bool:
    return True


@from_reference(unused={"logging_dir"})
class GameScheduler:
    """Scheduler of training and evaluation games; the n-th game of either kind does not depend on the other kind."""

    def __init__(
        self,
        model_sampler: BaseModelSampler,
        env_sampler: BaseEnvSampler,
        run_seed: int = 0,
        group_size: int = 1,
        shares_by: Literal["games", "steps"] = "games",
        rotates_groups: bool = False,
        other_samplers: Sequence[BaseModelSampler] = (),
    ) -> None:
        """Start with no games.

        shares_by: whether samplers' shares count games or the steps that games bring.
        rotates_groups: whether the models of a group change seats from game to game. other_samplers: of the other
        policies. Raises ConfigError for a sampler that lacks a part of the interface of its base class.
        """
        problems = interface_problems("model_sampler", model_sampler, ("registry", "sample_opponent", *STATE))
        problems += interface_problems("env_sampler", env_sampler, ("sample", *STATE))
        if problems:
            raise ConfigError(*problems)
        self.registry = model_sampler.registry
        self._samplers = {getattr(s.registry, "policy", ""): s for s in (model_sampler, *other_samplers)}
        """Sampler of each policy's opponents, by the policy's name."""
        self._env_sampler = env_sampler
        self._run_seed = run_seed
        self._group_size = group_size
        self._rng = random.Random(derive_seed(run_seed, "seats"))
        self._shares_by = shares_by
        self._rotates_groups = rotates_groups
        self._forks: Any = env_sampler if hasattr(env_sampler, "fork") else None
        """Env sampler that moves groups to other states, as that of examples/branching.py."""
        self._shares_rng = random.Random(derive_seed(run_seed, "shares"))
        self._steps_of: dict[str, tuple[int, float]] = {}
        """Number of games, at most `GAMES`, and running mean of the steps that they brought, by kind of game."""
        self._games: Counter[str] = Counter()
        """Number of games handed out, by kind."""
        self._met: Counter[tuple[str, str]] = Counter()
        """Number of seats of other policies that each policy met in games that it learns from, and at (policy, policy)
        the number of all seats that it met; only if several policies learn."""
        self._in_flight: set[int] = set()
        """Numbers of the games that are not over."""
        self._eval_turn = -1
        """Number of the policy in whose turn an evaluation beside training was drawn, counted on."""
        self._eval_games_of: Counter[str] = Counter()
        """Number of games by model, env and label, from which the next game's seat follows."""

    @property
    def samplers(self) -> tuple[BaseModelSampler, BaseEnvSampler]:
        return next(iter(self._samplers.values())), self._env_sampler

    @property
    def _named_samplers(self) -> dict[str, BaseModelSampler | BaseEnvSampler]:
        of_policies = {uid_of(policy, "model_sampler"): sampler for policy, sampler in self._samplers.items()}
        return {**of_policies, "env_sampler": self._env_sampler}

    def next_train_job(
        self, can_play: Callable[[ModelRef], bool] = _any_model, wanting: Sequence[str] | None = None
    ) -> GameSpec:
        """Return a game with the current policy at `num_actors` random seats and an opponent at each other seat.

        An opponent that cannot play now is drawn again. Raises OpponentError if no opponent that can is found.

        wanting: policies that take more steps, in the order of their need; None: all. The game is played for the first
        of them, and others at its seats learn from it, too, up to its player's share of their own opponents. In an env
        with `seats` all of them at the seats do.
        """
        can_play = cache(can_play)  # one answer for all seats of a game, because only one game may try a paused model
        wanting = list(self._samplers) if wanting is None else wanting
        for _ in range(DRAWS):
            policy, env, models = self._draw(can_play, wanting)
            # If a sampled opponent is a current policy itself, its turns are trained on too.
            trained = [
                pid
                for pid, model in enumerate(models)
                if model.policy in wanting
                and self._is_current(model)
                and (policy in (None, model.policy) or self._lacks(model.policy, policy))
            ]
            opponents = [model for pid, model in enumerate(models) if pid not in trained]
            if self._shares_by == "games" or self._is_kept(_kind_of(env.env_id, opponents)):
                break
        is_counted = len(self._samplers) > 1 and env.num_drawn  # a game of seats says nothing about `opponents`
        for policy in dict.fromkeys(models[pid].policy for pid in trained) if is_counted else ():
            self._met += Counter((policy, model.policy) for model in models if self._is_other(model, policy))
            self._met[policy, policy] += len(models) - 1
        seed = game_seed(self._run_seed, "train", self._games["train"])
        return new_game(env, models, self._next_idx("train"), "train", seed, trained)

    def _is_current(self, model: ModelRef) -> bool:
        return model == self._samplers[model.policy].registry.current

    def _is_other(self, model: ModelRef, policy: str) -> bool:
        """Return whether it is the newest adapter of another policy that learns."""
        return model.policy not in ("", policy) and self._is_current(model)

    def _lacks(self, policy: str, other: str) -> bool:
        """Return whether a policy met another one less often than by its share among the policy's opponents."""
        return self._met[policy, other] < self._samplers[policy].share_of(other) * (self._met[policy, policy] + 1)

    def _shares(self) -> dict[str, dict[str, float]]:
        """Return the shares of the policies among each policy's opponents."""
        return {name: {other: own.share_of(other) for other in self._samplers} for name, own in self._samplers.items()}

    def _draw(
        self, can_play: Callable[[ModelRef], bool], wanting: Sequence[str]
    ) -> tuple[str | None, TrainEnvSpec, list[ModelRef]]:
        """Return the policy that a game is for, None with `seats`, the env and the models at its seats."""
        for _ in range(ENV_DRAWS):
            env = self._env_sampler.sample("train")
            if env.seats is None or not set(env.seats).isdisjoint(wanting):
                break
        else:
            raise OpponentError(f"no env that was drawn has a seat for {', '.join(wanting)}")
        if env.seats is not None:
            return None, env, [self._samplers[name].registry.current for name in env.seats]
        pids = list(range(env.num_players))
        self._rng.shuffle(pids)
        *others, last = wanting
        for policy in others:
            with contextlib.suppress(OpponentError):
                return policy, env, self._seated(policy, env, pids, can_play)
        return last, env, self._seated(last, env, pids, can_play)

    def _seated(
        self, policy: str, env: TrainEnvSpec, pids: Sequence[int], can_play: Callable[[ModelRef], bool]
    ) -> list[ModelRef]:
        """Return the models of a game for a policy, which sits at the first of `pids`. Raises OpponentError."""
        models = [self._samplers[policy].registry.current] * env.num_players
        for pid in pids[env.num_actors :]:
            models[pid] = self._sample_opponent(policy, env.env_id, can_play)
        return models

    def _sample_opponent(self, policy: str, env_id: str, can_play: Callable[[ModelRef], bool]) -> ModelRef:
        """Return an opponent that can play, if possible not another policy that was met often enough."""
        sampler = self._samplers[policy]
        found: ModelRef | None = None
        for _ in range(DRAWS):
            opponent = sampler.sample_opponent(env_id)
            if not isinstance(opponent, ModelRef):
                raise ConfigError(
                    f"{sampler.kind} chose {opponent!r}, which is not a ModelRef; return the `ref` of a model of its "
                    "registry"
                )
            if can_play(opponent):
                found = opponent
                if not self._is_other(opponent, policy) or self._lacks(policy, opponent.policy):
                    break
        if found is None:
            raise OpponentError(f"{opponent.uid} cannot play now, nor can the other opponents that were drawn")
        return found

    def _is_kept(self, kind: str) -> bool:
        """Return at random whether to play a drawn game, with a probability inverse to the steps that it brings.

        The kind of game with the fewest steps is always kept, and so is a kind of which no game has ended.
        """
        if kind not in self._steps_of:
            return True
        fewest = min(mean for _, mean in self._steps_of.values())
        return self._shares_rng.random() * self._steps_of[kind][1] <= fewest

    def next_train_group(
        self, can_play: Callable[[ModelRef], bool] = _any_model, wanting: Sequence[str] | None = None
    ) -> list[GameSpec]:
        """Return `group_size` games that differ only in their number, and so in the actions that models sample.

        If groups rotate, they are one deal, and the models sit one seat further in each game.
        """
        first = self.next_train_job(can_play, *([] if wanting is None else [wanting]))  # a subclass may know one policy
        group = [first if self._group_size == 1 else replace(first, group_idx=first.game_idx)]
        for number in range(1, self._group_size):
            agents, n = first.agent_specs, first.num_players
            if self._rotates_groups:
                agents = tuple(replace(agents[(pid - number) % n], pid=pid) for pid in range(n))
            group.append(replace(group[0], game_idx=self._next_idx("train"), agent_specs=agents))
        return group if self._forks is None else self._forks.fork(group)

    def next_eval_job(
        self,
        spec: EvalEnvSpec | None = None,
        model: ModelRef | None = None,
        label: str | None = None,
        can_play: Callable[[ModelRef], bool] = _any_model,
        number: int | None = None,
    ) -> GameSpec:
        """Return a game with the model (default: the current policy) at one seat, the env's fixed opponent at others.

        If several policies learn, the default is each of them in turn. The seat rotates separately for each model, env
        and label. Without `spec`, an env whose opponent cannot play now is drawn again; raises OpponentError if no
        opponent that can is found.

        `number`: number of the game within an evaluation with a quota. It determines seat and seed, each seed is played
        from every seat, and all evaluations of an env play the same seeds, so that they can be compared in pairs.
        """
        self._eval_turn += 1
        policy = [*self._samplers][self._eval_turn % len(self._samplers)]
        env = spec or self._sample_eval_env(can_play, policy)
        subject = uid_of(policy, "current") if model is None else model.uid
        key = f"{subject} {env.env_id} {env.num_players} {env.opponent} {label}"
        count = self._eval_games_of[key] if number is None else number
        seat = count % env.num_players
        self._eval_games_of[key] += number is None
        seed = game_seed(self._run_seed, "eval", self._games["eval"])
        if number is not None:
            of_quota = derive_seed(self._run_seed, "quota", env.env_id, env.num_players)
            seed = game_seed(of_quota, "eval", number // env.num_players)
        if content_file(env.env_id):
            seed = question_seed(count)
        models = [model or self._samplers[policy].registry.current]
        if env.num_players > 1:
            opponent = self.registry.eval_opponent(env.fixed_opponent)
            models = [models[0] if pid == seat else opponent for pid in range(env.num_players)]
        return new_game(env, models, self._next_idx("eval"), "eval", seed, label=label)

    def _sample_eval_env(self, can_play: Callable[[ModelRef], bool], policy: str) -> EvalEnvSpec:
        for _ in range(DRAWS):
            env = self._env_sampler.sample("eval")
            is_other = env.fixed_opponent != f"policy:{policy}"
            if env.num_players == 1 or (is_other and can_play(self.registry.eval_opponent(env.fixed_opponent))):
                return env
        raise OpponentError(f"{env.fixed_opponent} cannot play now, nor can the other opponents that were drawn")

    def update(self, record: GameRecord) -> None:
        """Update ratings, and in training samplers; not with a void game, nor one that began at a branch."""
        spec = record.spec
        self._in_flight.discard(spec.game_idx)
        if self._forks is not None and spec.kind == "train":
            self._forks.add_record(record)
        if record.end == "void":
            return
        if spec.kind == "train":
            kind = _kind_of(spec.env_id, [agent.model for agent in spec.agent_specs if not agent.collect_data])
            n, mean = self._steps_of.get(kind, (0, 0.0))
            n, steps = min(n + 1, GAMES), sum(len(trajectory.steps) for trajectory in record.trajectories)
            self._steps_of[kind] = n, mean + (max(steps, 1) - mean) / n
        if spec.start is not None:
            return
        uids = {agent.pid: agent.model.uid for agent in spec.agent_specs}
        teams = record.teams or {}
        tell_result(self.registry.update_ratings, uids, record.rewards, spec.env_id, teams=record.teams)
        if spec.kind == "train":  # evaluations may sample otherwise, and 400 games would replace a sampler's memory
            trained = {agent.pid: agent.model.policy for agent in spec.agent_specs if agent.collect_data}
            for policy in dict.fromkeys(trained.values()):
                tell_result(self._samplers[policy].update, uids, record.rewards, spec.env_id, teams=record.teams)
            own = {teams.get(pid, pid) for pid in trained}
            actors = [record.rewards[pid] for pid in trained]
            opponents = [record.rewards[pid] for pid in uids if teams.get(pid, pid) not in own]
            average = sum(opponents) / len(opponents) if opponents else None
            self._env_sampler.update(spec.env_id, sum(actors) / len(actors), average)

    def state_dict(self) -> dict[str, Any]:
        """Return counters and random streams, the samplers' too; the registry has its own state."""
        return {
            "games": dict(self._games),
            "in_flight": sorted(self._in_flight),
            "eval_games_of": dict(self._eval_games_of),
            "rng": state_of(self._rng),
            "shares_rng": state_of(self._shares_rng),
            "steps_of": {kind: list(steps) for kind, steps in self._steps_of.items()},
            **({"met": [[*pair, n] for pair, n in self._met.items()], "shares": self._shares()} if self._met else {}),
            **{
                name: {"kind": sampler.kind, "state": lasting(sampler.kind, sampler.state_dict())}
                for name, sampler in self._named_samplers.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Load a state; return a message for each sampler of another kind, which starts from scratch.

        Games that were in flight are forgotten, and those of a policy that has other shares of opponents than it had.
        """
        self._games = Counter(msgspec.convert(state["games"], dict[str, int]))
        self._in_flight.clear()
        self._eval_games_of = Counter(msgspec.convert(state["eval_games_of"], dict[str, int]))
        restore(self._rng, state["rng"])
        restore(self._shares_rng, state["shares_rng"])
        self._steps_of = {kind: (n, mean) for kind, (n, mean) in state["steps_of"].items()}
        shares = self._shares() if "met" in state else {}
        of_same = (one for one in state.get("met", ()) if state.get("shares", {}).get(one[0]) == shares.get(one[0]))
        self._met = Counter({(policy, other): n for policy, other, n in of_same})
        left_out = []
        for name, sampler in self._named_samplers.items():
            saved = state[name]
            if saved["kind"] == sampler.kind:
                sampler.load_state_dict(saved["state"])
            else:
                left_out.append(f"{sampler.kind} starts from scratch: so far the run used {saved['kind']}")
        return left_out

    def _next_idx(self, kind: GameKind) -> int:
        """Return the number of a game that is being handed out, and count the game."""
        game_idx = self._games.total()
        self._games[kind] += 1
        self._in_flight.add(game_idx)
        return game_idx


def new_game(
    env: EnvSpec,
    models: Sequence[ModelRef],
    game_idx: int,
    kind: GameKind,
    seed: int,
    trained: Collection[int] = (),
    label: str | None = None,
) -> GameSpec:
    """Return a game with `models` at its seats, in their order; `trained`: seats whose turns are trained on."""
    return GameSpec(
        game_idx=game_idx,
        kind=kind,
        env_id=env.env_id,
        num_players=env.num_players,
        seed=seed,
        agent_specs=tuple(
            AgentSpec(
                pid=pid,
                model=_drawn(model, seed),
                collect_data=pid in trained,
                prompt_template=env.prompt_template,
                action_extraction_fn=env.extraction,
            )
            for pid, model in enumerate(models)
        ),
        max_turns=env.max_turns,
        observation=env.observation,
        isolated=env.isolated,
        reward_scale=env.reward_scale,
        env_kwargs=env.env_kwargs,
        error_allowance=env.error_allowance,
        sampling=env.sampling if isinstance(env, EvalEnvSpec) else None,
        eval_label=label,
    )


def _drawn(model: ModelRef, seed: int) -> ModelRef:
    """Return the model with its adapter in the game of this seed, which is drawn for an average."""
    if model.adapter_version is None or model.name is None or parse_player(model.name).kind != "average":
        return model
    number = drawn_member([*members(model.name).values()], seed, model.name)
    return replace(model, adapter_version=model.adapter_version + number)


def _kind_of(env_id: str, opponents: Iterable[ModelRef]) -> str:
    """Return the kind that determines how many steps a game brings: its env and the players that are not trained."""
    return " ".join([env_id, *sorted(opponent.name or "checkpoint" for opponent in opponents)])
