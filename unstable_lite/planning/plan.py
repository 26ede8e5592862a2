"""Plan of a run, made before any process starts: its devices and memory, or every reason why the config cannot run.

Loads neither torch nor transformers; makes and resets each env once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from unstable_lite.adapters.frozen import copies_of
from unstable_lite.config import Config
from unstable_lite.config.games import against
from unstable_lite.config.reading import read_config
from unstable_lite.engines.vllm_checks import SERVER_KIND as VLLM_SERVER
from unstable_lite.errors import ConfigError
from unstable_lite.games.env_catalogue import trial
from unstable_lite.league.opponents import by_policy, describe_strategy, frozen_adapters, training_opponents
from unstable_lite.models import read_json, resolve_model
from unstable_lite.models.layers import no_forest
from unstable_lite.planning import staleness
from unstable_lite.planning.defaults import active_checkpoints, adapter_slots_needed, adapters_in_memory, policy_configs
from unstable_lite.planning.envs import (
    context_warnings,
    describe_envs,
    describe_exact,
    played_otherwise,
    template_warnings,
    thinking_warnings,
)
from unstable_lite.planning.memory import learner_memory, shape_of
from unstable_lite.planning.placement import Placement, engine_of, listed, machine_problems, machine_warnings, place
from unstable_lite.planning.policies import policy_warnings
from unstable_lite.planning.rules import critic_warnings
from unstable_lite.planning.trust import clear_key_warnings
from unstable_lite.planning.validation import find_engine_problems, find_problems
from unstable_lite.transport.cpus import usable_cpus

MIB = 1 << 20
ENGINE_THREADS_ON_GPU = 1
"""Number of CPU threads above which vLLM warns that threads wait for each other in its host code."""
LEARNER_THREADS_ON_GPU = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Placement):
    """A config that can run, with the decisions about it.

    In its `config`, `engine.kind`, checkpointing and all settings that depend on the algorithm are decided.
    """

    engine_reason: str
    checkpointing_reason: str
    engine_threads: int
    learner_threads: int
    game_lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Turns of some games of random moves, by training env; empty if no random player knows the moves."""
    copies: Path | None = None
    """Directory of the copies of frozen players that the config stands for, if it is the config of a run."""

    @property
    def num_eval_workers(self) -> int:
        """Number of evaluation games in flight beside training."""
        return self.config.run.num_eval_workers if self.config.eval_envs else 0

    def describe(self) -> Iterator[tuple[str, str]]:
        """Yield readable rows (name, description) of the run's processes, memory, games and batches."""
        config = self.config
        yield from self._describe_workers()
        warnings = (machine_warnings(self), thinking_warnings(config), context_warnings(config))
        of_policies = (by_policy(config, critic_warnings), policy_warnings(config))
        for texts in (*warnings, clear_key_warnings(config), template_warnings(config), *of_policies):
            yield from (("warning", text) for text in texts)
        yield from Placement.describe(self)
        yield from self._describe_models()
        yield from self._describe_games()

    def _describe_workers(self) -> Iterator[tuple[str, str]]:
        learner = self.config.learner
        algorithms = " and ".join(dict.fromkeys(own.algorithm for own in policy_configs(self.config).values()))
        for index, devices in enumerate(self.devices_by_engine):
            yield f"engine-{index}", f"{self.config.engine.kind} on {_with_threads(devices, self.engine_threads)}"
        yield "engine choice", self.engine_reason
        for rank, device in enumerate(self.learner_devices):
            where = _with_threads((device,), self.learner_threads)
            yield (f"learner-{rank}", where) if rank else ("learner", f"{algorithms} on {where}")
        if self.learner_devices:
            is_on = "on" if learner.activation_checkpointing else "off"
            yield "checkpointing", f"{is_on}: {self.checkpointing_reason}"
            yield "shared prefixes", self._shared_prefixes()
        if learner.remote_ranks:
            join = f"torchrun … -m unstable_lite.learner.remote_rank {learner.rendezvous}"
            yield "remote ranks", f"{learner.remote_ranks} more ranks of the learner: {join}"
        if self.num_ranks > 1:
            yield "learner ranks", f"{self.num_ranks}: each has a part of every batch, split by tokens"

    def _shared_prefixes(self) -> str:
        """Return whether the learner is expected to compute them once."""
        file = Path(resolve_model(self.config.model_name)) / "config.json"
        if self.config.lora.lora_dropout:
            return "computed for each step in an update, because lora.lora_dropout differs from step to step"
        if file.is_file() and (reason := no_forest(read_json(file), self.config.trust_remote_code)):
            return f"computed for each step, because {reason}"
        return "computed once, if the learner's comparison at its start agrees"

    def _describe_models(self) -> Iterator[tuple[str, str]]:
        config, league = self.config, self.config.league
        is_here = Path(resolve_model(config.model_name)).is_dir()
        unseen = " (from the Hugging Face hub or its cache, which nothing but the run looks at)"
        yield "base model", config.model_name + unseen * (not is_here)
        yield from (("differs", difference) for difference in played_otherwise(config))
        for name, own in policy_configs(config).items():
            yield ("policy", self._describe_policy(name, own)) if name else ("opponents", _opponents(own))
        if (older := active_checkpoints(config) - len(config.shares)) > 0:
            least, most = league.opponent_lag
            by = f"by {league.active_checkpoints_by}, {least} to {most} updates back"
            yield "older checkpoints", f"at most {older} as opponents, {by}"
        if frozen := frozen_adapters(config):
            yield "frozen players", f"{', '.join(frozen)}: in one adapter slot each for the whole run"
        yield "adapter slots", f"{config.engine.max_loras} per worker; at least {adapter_slots_needed(config)} needed"
        shape = shape_of(config.model_name)
        if shape is not None and (size := 4 * shape.lora_parameters(config.lora)):
            total = size * adapters_in_memory(config)
            yield "adapters", f"{size / MIB:.1f} MiB per adapter, up to {total / MIB:.0f} MiB in shared memory"
            if config.policies:
                more = f"{learner_memory(shape, config.changed(policies={})).adapter / MIB:.1f} MiB more in the learner"
                yield "a further policy", f"{more}, with its moments; two adapter slots or more"
        if config.engine.kind == VLLM_SERVER:
            yield "adapters to the servers", f"through {config.engine.adapter_folder}, the same path for the servers"
            yield "engine memory", "set by the servers"
        elif set(self.engine_devices) == {"cpu"}:
            yield "engine memory", f"up to {config.engine.kv_cache_gb:g} GB for the KV cache"
        else:
            shares = {devices: self.divided_for(devices).engine.gpu_share for devices in self.devices_by_engine}
            by_engine = ", ".join(f"{share:.0%} of {listed(devices)}" for devices, share in shares.items())
            one, *others = dict.fromkeys(shares.values())
            yield "engine memory", by_engine if others else f"{one:.0%} of the GPU"

    def _describe_policy(self, name: str, own: Config) -> str:
        """Return a readable description of one of several policies. `own`: its config."""
        policy, size = self.config.policies[name], active_checkpoints(own)
        changed = [f"learner.{key} = {value!r}" for key, value in policy.learner.items()]
        changed = [own.algorithm] * (own.algorithm != self.config.algorithm) + changed
        of_run = self.config.shares[name]
        share = f"{name}: {of_run:.0%} of the updates, about {of_run * self.config.run.learning_steps:.0f}"
        pool = [f"{size - 1} older checkpoints"] * (size > 1)
        return "; ".join([share, f"against {_opponents(own)}", *pool, *changed])

    def _describe_games(self) -> Iterator[tuple[str, str]]:
        config, run = self.config, self.config.run
        yield "training games", ", ".join(spec.env_id for spec in config.train_envs)
        if config.eval_envs and run.eval_games:
            played = ", ".join(f"{spec.env_id}{against(spec.opponent)}" for spec in config.eval_envs)
            yield "evaluations", f"{played}; {run.eval_games} games each"
        games = f"{run.num_collection_workers} training, {self.num_eval_workers} evaluation"
        if run.schedule == "sync":
            games = f"complete rounds of at most {run.num_collection_workers}, each followed by an update"
        yield "games in flight", games
        yield from staleness.describe(config, self.game_lengths)
        yield from describe_envs(config)
        yield from describe_exact(config, is_on_gpu="cpu" not in self.learner_devices)
        if run.group_size > 1:
            yield "groups", f"{run.group_size} games from each start, compared by {config.group_baseline}"
        for name, own in policy_configs(config).items():
            yield from ((what, f"{name}: {text}" if name else text) for what, text in _describe_batches(own))


def _opponents(config: Config) -> str:
    """Return a readable description of the players at the seats that a policy does not take."""
    strategy = describe_strategy(config.league)
    if not any(spec.num_drawn for spec in config.train_envs):
        if any(spec.seats for spec in config.train_envs):
            return "the policies of `seats`"
        remark = f" (so opponent_sampling_strategy = {strategy} is not used)" * (strategy != "none")
        return f"none: num_actors = num_players, every seat is the current policy's{remark}"
    fixed = {env_id: ", ".join(names) or "none" for env_id, names in training_opponents(config).items()}
    if len(set(fixed.values())) == 1:
        return f"{strategy}, fixed ones: {next(iter(fixed.values()))}"
    return "; ".join([f"{strategy}", *(f"fixed ones in {env_id}: {names}" for env_id, names in fixed.items())])


def _describe_batches(config: Config) -> Iterator[tuple[str, str]]:
    whole = ", whole trajectories" * (config.buffer.kind == "episodes")
    yield "buffer", f"{config.buffer_size} steps, batches of {config.learner.batch_size}{whole}"
    shown = []
    for kind in ("final", "step", "sampling"):
        entries = getattr(config.rewards, f"{kind}_reward_transformation") or ()
        names = [entry if isinstance(entry, str) else entry.name for entry in entries]
        shown.append(f"{kind}: {' + '.join(names) or 'none'}")
    yield "rewards", "; ".join(shown)


def load_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read, validate and plan a config; that of a run stands for the run's own copies of frozen players.

    Raises ConfigError with every problem at once, of form and of meaning.
    """
    copies = copies_of(path)
    return _plan_run(checked_config(path, overrides, partial(find_problems, copies=copies)), copies)


def checked_config(
    path: Path, overrides: Sequence[str] = (), find: Callable[[Config], Sequence[str]] = lambda _: ()
) -> Config:
    """Read a config. `find`: returns its problems of meaning. Raises ConfigError with every problem at once."""
    config, problems = read_config(path, tuple(overrides))
    if config is not None:
        problems += [f"{path}: {problem}" for problem in find(config)]
    if problems or config is None:
        raise ConfigError(*problems)
    return config


def make_plan(config: Config, copies: Path | None = None) -> Plan:
    """Plan a run. `copies`: directory of the copies of frozen players that the config stands for, see `Plan.copies`.

    Raises ConfigError with every problem of meaning.
    """
    if problems := find_problems(config, copies):
        raise ConfigError(*problems)
    return _plan_run(config, copies)


def make_engine_plan(config: Config) -> Plan:
    """Plan engines that have all devices to themselves. Raises ConfigError with every problem of engines and envs."""
    if problems := find_engine_problems(config):
        raise ConfigError(*problems)
    placed = place(config, has_learner=False)
    if problems := list(machine_problems(placed)):
        raise ConfigError(*problems)
    return plan_workers(placed)


def _plan_run(config: Config, copies: Path | None) -> Plan:
    lengths = {spec.env_id: trial(spec).lengths for spec in config.train_envs}
    return replace(plan_workers(place(config)), copies=copies, game_lengths=lengths)


def plan_workers(placed: Placement) -> Plan:
    """Decide engine and threads for a config without problems. Raises ConfigError if the engine cannot serve."""
    learner, why_checkpointed = placed.decide_checkpointing()
    config, engine_devices, learner_devices = placed.config, placed.engine_devices, placed.learner_devices
    kind, reason = engine_of(config, engine_devices)
    workers_on_cpu = [*engine_devices, *learner_devices].count("cpu")
    share = max(1, usable_cpus() // max(1, workers_on_cpu))
    return Plan(
        config=config.changed(engine={"kind": kind}, learner=learner),
        engine_devices=engine_devices,
        learner_devices=learner_devices,
        engine_reason=reason,
        checkpointing_reason=why_checkpointed,
        engine_threads=config.engine.threads or (share if "cpu" in engine_devices else ENGINE_THREADS_ON_GPU),
        learner_threads=learner.threads or (share if "cpu" in learner_devices else LEARNER_THREADS_ON_GPU),
    )


def _with_threads(devices: Sequence[int | str], threads: int) -> str:
    return listed(devices) + f", {threads} thread{'s' * (threads > 1)}" * ("cpu" in devices)
