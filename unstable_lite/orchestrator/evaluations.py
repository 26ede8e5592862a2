"""Evaluations with a quota of games: before, during and after training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.config.training import RunConfig
from unstable_lite.orchestrator.event_loop import unless_set
from unstable_lite.orchestrator.progress import Progress
from unstable_lite.orchestrator.wiring import RunParts
from unstable_lite.tracking.evaluations import summarise_evaluation
from unstable_lite.types import GameRecord, ModelRef


class Evaluations:
    def __init__(self, parts: RunParts, progress: Progress) -> None:
        self._parts = parts
        self._progress = progress

    @property
    def is_due(self) -> bool:
        """Whether an evaluation follows the last update; the end of the run has its own."""
        run, updates = self._parts.plan.config.run, self._progress.updates
        return updates < run.learning_steps and is_evaluated(run, updates)

    async def evaluate(self, label: str) -> None:
        """Evaluate the newest policy on every env on which it was not evaluated before the run resumed."""
        config = self._parts.plan.config
        if label == "before":
            exact = await self._parts.exact.metrics(0)
            self._parts.tracker.log(0, exact)
            self._parts.health.check_exploitability(exact)
        if not config.run.eval_games or self._parts.stop.is_set():
            return
        model, update = self._parts.registry.current, self._progress.updates
        known = self.done()
        envs = [env for env in config.eval_envs if (env.env_id, env.opponent) not in known]
        with self._parts.table.leased(model.adapter_version or 0):  # between two envs the policy may change
            for env in envs:
                if not await self._evaluate_on(env, model, update, label):
                    return

    def done(self) -> list[tuple[str, str]]:
        """Return env and opponent of each evaluation of the newest policy that has ended."""
        return [(e.env_id, e.opponent) for e in self._parts.tracker.evaluations if e.step == self._progress.updates]

    async def _evaluate_on(self, env: EvalEnvSpec, model: ModelRef, update: int, label: str) -> bool:
        """Return False if the run was stopped before the evaluation ended."""
        parts, run = self._parts, self._parts.plan.config.run
        records: list[GameRecord] = []
        name = f"evaluation {label}: {env.env_id}"
        playing = parts.collector.evaluate(
            env, model, run.eval_games, label, concurrency=run.num_collection_workers, records=records
        )
        with parts.terminal.doing(partial(_so_far, name, records, run.eval_games)):
            if await unless_set(playing, parts.stop) is None:
                parts.terminal.say(f"broken off: {_so_far(name, records, run.eval_games)}")
                return False
        evaluation = summarise_evaluation(label, update, model, env.env_id, env.opponent, records)
        parts.tracker.add_evaluation(evaluation)
        parts.terminal.say(f"evaluation {label}: {evaluation.describe()}")
        same = [e for e in parts.tracker.evaluations if (e.env_id, e.opponent) == (env.env_id, env.opponent)]
        if same[0] is not evaluation and (change := evaluation.describe_change(same[0])) is not None:
            parts.terminal.say(f"evaluation {label}: {change}")
        parts.health.check_evaluation(evaluation)
        return True


def is_evaluated(config: RunConfig, update: int) -> bool:
    """Return whether an evaluation with a quota follows the update."""
    return update == config.learning_steps or (config.eval_every is not None and update % config.eval_every == 0)


def _so_far(name: str, records: Sequence[GameRecord], num_games: int) -> str:
    return f"{name}, {len(records)} of {num_games} games"
