"""Evaluations before, during and after training: with a quota of games, and by best responses to the policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len, set_cell_size

from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec, EvalEnvSpec, TrainEnvSpec
from unstable_lite.config.training import RunConfig
from unstable_lite.dashboards.text_rows import all_shortened
from unstable_lite.errors import RequestError
from unstable_lite.files import read_records
from unstable_lite.games.openspiel.game_tree import GameTree, flatten, renormalised
from unstable_lite.games.templates import Template, questions
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.orchestrator.event_loop import first_reason, unless_set
from unstable_lite.planning.envs import exact_envs
from unstable_lite.rng import derive_seed
from unstable_lite.rollout.collector import LockStep
from unstable_lite.rollout.sampled_policy import sample_policy
from unstable_lite.tracking.displayed_metrics import named, of_policy
from unstable_lite.tracking.evaluations import Evaluation, summarise_evaluation
from unstable_lite.tracking.result_rows import result_rows, row_label
from unstable_lite.types import GameRecord, ModelRef, policy_of, uid_of

if TYPE_CHECKING:
    from unstable_lite.orchestrator.checkpoint_pool import TrainedPolicy
    from unstable_lite.orchestrator.progress import Progress
    from unstable_lite.orchestrator.wiring import RunParts

ExactGame = tuple[EnvSpec, GameTree, Sequence[tuple[str, tuple[str, ...]]], tuple[str, ...]]
"""Env, game, questions and stop strings of an exact evaluation; no questions if answers are sampled."""


class Evaluations:
    def __init__(self, parts: RunParts, progress: Progress) -> None:
        self._parts = parts
        self._progress = progress
        self._headers = set[str]()
        """Kinds of values below whose header results were said."""

    @property
    def is_due(self) -> bool:
        """Whether an evaluation follows the last update; the end of the run has its own."""
        run, updates = self._parts.plan.config.run, self._progress.updates
        return updates < run.learning_steps and is_evaluated(run, updates)

    async def evaluate(self, label: str) -> None:
        """Evaluate each policy's newest adapter on every env on which it was not evaluated before the run resumed."""
        parts, config, update = self._parts, self._parts.plan.config, self._progress.updates
        if not config.run.eval_games or parts.stop.is_set():
            return
        known = self.done()
        models = {name: policy.registry.current for name, policy in parts.policies.items()}
        versions = [model.adapter_version for model in models.values()]
        with parts.table.leased(*versions):  # between two envs a policy may change
            for name, model in models.items():
                for env in config.of_policy(name).eval_envs:
                    cell = env.env_id, env.opponent, *filter(None, [name])
                    if cell not in known and not await self._evaluate_on(env, model, update, label):
                        return

    async def evaluate_exactly(self) -> None:
        """Log exact evaluations that are due before the first update, or that a stop broke off."""
        parts, update = self._parts, self._progress.updates
        if parts.plan.config.run.exact_every is None:
            return
        records = read_records(parts.directory / "metrics.jsonl") if parts.resume_from is not None else ()
        logged, times = set[str](), Counter[str]()
        for line in records:
            times.update(line.keys())
            logged.update(line if line["step"] == update else ())
        for policy in parts.policies.values():
            # Of a policy that did not make the newest update, they may be at the step of an earlier one.
            num_due = policy.updates // parts.plan.config.run.exact_every + 1
            exact = await parts.exact.metrics(policy, logged | {name for name in times if times[name] >= num_due})
            parts.tracker.log(update, of_policy(policy.name, exact))
            parts.health.check_exploitability(exact, policy.name)

    def done(self) -> list[tuple[str, ...]]:
        """Return the cells (see `evaluated_cells`) of the evaluations of the newest policies that have ended."""
        evaluations = self._parts.tracker.evaluations
        return [evaluated_cell(asdict(one)) for one in evaluations if one.step == self._progress.updates]

    async def _evaluate_on(self, env: EvalEnvSpec, model: ModelRef, update: int, label: str) -> bool:
        """Return False if the run was stopped before the evaluation ended."""
        parts, run = self._parts, self._parts.plan.config.run
        records: list[GameRecord] = []

        def so_far() -> str:
            return f"evaluation {label}: {env.env_id}, {len(records)} of {run.eval_games} games"

        playing = parts.collector.evaluate(
            env, model, run.eval_games, label, concurrency=run.num_collection_workers, records=records
        )
        with parts.terminal.doing(so_far):
            if await unless_set(playing, parts.stop) is None:
                parts.terminal.say(f"broken off: {so_far()}")
                return False
        evaluation = summarise_evaluation(label, update, model, env.env_id, env.opponent, records)
        parts.tracker.add_evaluation(evaluation)
        self._say(evaluation)
        parts.health.check_evaluation(evaluation)
        return True

    def _say(self, evaluation: Evaluation) -> None:
        """Say an evaluation in one row, below a header for the first one, and each of its remarks."""
        parts, say = self._parts, self._parts.terminal.say
        config, cells, when = parts.plan.config, parts.plan.config.eval_cells, f"update {evaluation.step}"
        # Without a result it is not among the rows if others have one.
        rows = [row for row in parts.results() if evaluation is row.newest]
        (row,) = rows or result_rows([evaluation], cells)
        labels = [row_label(*cell, cells, policy) for policy in config.shares for cell in cells]
        short = dict(zip(labels, all_shortened(labels), strict=True))
        room = max(map(cell_len, ["opponent", *short.values()]))
        of_when, of_value = len(f"update {config.run.learning_steps}"), 18 if evaluation.is_share else 25
        form = f"{{:<{of_when}}}  {{}}  {{:<{of_value}}}  {{}}"
        if (value := row.newest.value_name) not in self._headers:
            self._headers.add(value)
            say(form.format("when", "opponent".ljust(room), f"{value} (95 %)", "change"))
        result = f"{evaluation.value_text} ({evaluation.interval_text})" if evaluation.n else "no result"
        say(form.format(when, set_cell_size(short[row.label], room), result, row.change_text))
        for remark in (*evaluation.remarks, *filter(None, [evaluation.utility_text])):
            say(f"{when}  {row.label}: {remark}")


def evaluated_cells(config: Config) -> list[tuple[str, ...]]:
    """Return env and opponent of each evaluation with a quota, and the policy's name if the run has several."""
    return [(*cell, *filter(None, [name])) for name in config.shares for cell in config.of_policy(name).eval_cells]


def evaluated_cell(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cell of an evaluation's record."""
    return (line["env_id"], line["opponent"], *filter(None, [policy_of(line["model"])]))


def is_evaluated(config: RunConfig, update: int) -> bool:
    """Return whether an evaluation with a quota follows the update."""
    return update == config.learning_steps or (config.eval_every is not None and update % config.eval_every == 0)


class ExactEvaluations:
    """Exploitability of the newest policy, every `run.exact_every` updates."""

    def __init__(self, parts: RunParts, templates: Mapping[str, Template], lock_step: LockStep | None) -> None:
        self._parts, self._lock_step = parts, lock_step
        self._run = parts.plan.config.run
        self._games: list[ExactGame] = []
        for env in exact_envs(parts.plan.config)[0]:
            tree, template = flatten(env.env_id), templates[env.prompt_template]
            states = [state.observation for state in tree.states] if self._run.exact_samples is None else []
            texts = [(question.prompt, question.answers) for question in questions(env, template, states)]
            self._games.append((env, tree, texts, template.stop))

    async def metrics(self, policy: TrainedPolicy, logged: Collection[str] = ()) -> dict[str, float]:
        """Return the exploitabilities of a policy's newest adapter that are due after its update, except `logged` ones.

        In an env with `seats` it is that of the policies there together. An env whose answers cannot be scored, or
        sampled, raises an alarm instead.
        """
        name = uid_of(policy.name, "exploitability")
        games = [game for game in self._games if f"{name}/{game[0].env_id}" not in logged]
        games = [game for game in games if policy.name in self._seats(game[0], policy)]
        if not games or self._run.exact_every is None or policy.updates % self._run.exact_every:
            return {}
        return await (self._computed if self._run.exact_samples is None else self._sampled)(policy, games)

    async def _computed(self, policy: TrainedPolicy, games: Sequence[ExactGame]) -> dict[str, float]:
        scores = {}
        async with self._parts.colocation.learner():
            for env, tree, texts, stop in games:
                seats = self._seats(env, policy)
                try:
                    asked = {name: self._parts.policies[name].learner for name in seats}
                    of = {name: await learner.score_answers(texts, stop) for name, learner in asked.items()}
                except RequestError as error:
                    self._alarm(env, policy, error)
                else:
                    scores[env.env_id] = tree, [of[seats[s.seat]][n] for n, s in enumerate(tree.states)]
        metrics: dict[str, float] = {}
        for env_id, (tree, logprobs) in scores.items():
            answers = [np.exp(logp.astype(np.float64)) for logp in logprobs]
            for name, played in (("exploitability", answers), ("exploitability_legal", renormalised(answers))):
                metrics[f"{name}/{env_id}"] = await asyncio.to_thread(tree.exploitability, played)
        return metrics

    async def _sampled(self, policy: TrainedPolicy, games: Sequence[ExactGame]) -> dict[str, float]:
        """Ask the engines for answers, beside the games; without an env that a stop of the run interrupts."""
        parts, run, metrics = self._parts, self._run, dict[str, float]()
        samples, update, seed = run.exact_samples or 0, policy.updates, policy.config.run.seed
        for env, tree, *_ in games:
            first = -1 - update * samples * len(tree.states)
            models = [parts.policies[name].registry.current for name in self._seats(env, policy)]
            game = new_game(env, models, first, "eval", derive_seed(seed, "exact", update))
            asking = sample_policy(
                parts.collector.seats, game, tree, samples, run.num_collection_workers, self._lock_step
            )
            try:
                with parts.table.leased(*(model.adapter_version for model in models)):
                    sampled = await unless_set(asking, parts.stop)
            except ExceptionGroup as group:
                if not isinstance(error := first_reason(group), RequestError):
                    raise
                self._alarm(env, policy, error)
                continue
            if sampled is None:
                break
            for name, value in (await asyncio.to_thread(sampled.metrics)).items():
                metrics[f"{'exploitability_other_answers' if name == 'rest' else name}/{env.env_id}"] = value
        return metrics

    @staticmethod
    def _seats(env: EnvSpec, policy: TrainedPolicy) -> tuple[str, ...]:
        """Return the name of the policy at each seat: its own, unless the env has `seats`."""
        return (env.seats if isinstance(env, TrainEnvSpec) else None) or (policy.name,) * env.num_players

    def _alarm(self, env: EnvSpec, policy: TrainedPolicy, error: Exception) -> None:
        text = f"no exact evaluation of {env.env_id} after update {policy.updates}: {error}"
        self._parts.alarm(named(policy.name, text))
