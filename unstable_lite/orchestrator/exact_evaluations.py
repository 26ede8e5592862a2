"""Exact evaluations while training: exploitability of the newest policy, computed from the learner's probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import numpy as np

from unstable_lite.config import Config
from unstable_lite.errors import RequestError
from unstable_lite.games.answers import questions
from unstable_lite.games.game_tree import renormalised
from unstable_lite.games.openspiel.flatten import flatten
from unstable_lite.games.templates import Template
from unstable_lite.learner.client import LearnerClient
from unstable_lite.orchestrator.colocation import Colocation
from unstable_lite.planning.exact import exact_envs


class ExactEvaluations:
    def __init__(
        self,
        config: Config,
        templates: Mapping[str, Template],
        learner: LearnerClient,
        colocation: Colocation,
        alarm: Callable[[str], None],
    ) -> None:
        self._every = config.run.exact_every
        self._learner, self._colocation, self._alarm = learner, colocation, alarm
        self._games = []
        """Env id, game, questions and stop strings of each env."""
        for env in exact_envs(config)[0]:
            tree, template = flatten(env.env_id), templates[env.prompt_template]
            asked = questions(env, template, [state.observation for state in tree.states])
            texts = [(question.prompt, question.answers) for question in asked]
            self._games.append((env.env_id, tree, texts, template.stop))

    async def metrics(self, update: int) -> dict[str, float]:
        """Return the exploitabilities of the learner's newest adapter after `update`, if they are due then.

        Without an env whose answers the learner cannot score, for which an alarm is raised.
        """
        scores = {}
        if not self._games or self._every is None or update % self._every:
            return {}
        async with self._colocation.learner():
            for env_id, tree, texts, stop in self._games:
                try:
                    scores[env_id] = tree, await self._learner.score_answers(texts, stop)
                except RequestError as error:
                    self._alarm(f"no exact evaluation of {env_id} after update {update}: {error}")
        metrics: dict[str, float] = {}
        for env_id, (tree, logprobs) in scores.items():
            policy = [np.exp(logp.astype(np.float64)) for logp in logprobs]
            for name, played in (("exploitability", policy), ("exploitability_legal", renormalised(policy))):
                metrics[f"{name}/{env_id}"] = await asyncio.to_thread(tree.exploitability, played)
        return metrics
