"""All games in rounds: one call with the prompts of all games, then one step of every env.

Stands for what a user of vLLM's offline `LLM.generate` writes, and for rollout loops around a batched environment. The
schedule is run against this project's engine processes, where a round is as many requests at once, and for real
against `LLM.generate`. A game that is over is replaced before the next round. Leaves out scheduling by ratings, buffer,
records, metrics and adapters, all of which ours has.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from bench.harness import Questioner, memory_mb, started_engine
from bench.peers import offline_llm
from unstable_lite.config import Config
from unstable_lite.games.environments import Environment
from unstable_lite.games.templates import TEMPLATES, Template, find_extraction
from unstable_lite.models import resolve_model
from unstable_lite.types import GameSpec

GenerateAll = Callable[[Sequence[str]], Awaitable[tuple[list[str], int]]]
"""Function of prompts that returns the text of an answer each, and their total number of tokens."""


class Rounds:
    """Games in which the policy has every seat."""

    def __init__(self, next_spec: Callable[[], GameSpec], num_games: int) -> None:
        self._next_spec = next_spec
        spec = next_spec()
        agent = spec.agent_specs[0]
        self.template: Template = TEMPLATES[agent.prompt_template]
        self._num_players = spec.num_players
        self._extract = find_extraction(agent.action_extraction_fn)
        self._games = [self._new_game() for _ in range(num_games)]

    async def play_one(self, generate: GenerateAll) -> tuple[int, int]:
        """Play the next turn of every game; return the numbers of turns and tokens."""
        observations = [game.observe()[1] for game in self._games]
        answers, tokens = await generate([self.template.prompt(text, self._num_players) for text in observations])
        for index, answer in enumerate(answers):
            action, _ = self._extract(answer)
            if self._games[index].step(action):
                self._games[index].close()
                self._games[index] = self._new_game()
        return len(answers), tokens

    def _new_game(self) -> Environment:
        spec = self._next_spec()
        return Environment(spec.env_id, spec.num_players, spec.seed)


async def measure(questioner: Questioner, config: Config, next_spec: Callable[[], GameSpec]) -> None:
    """Measure with an engine process of this project."""
    async with started_engine(config, threads=questioner.arguments["threads"]) as (pool, _):
        rounds = Rounds(next_spec, questioner.arguments["games"])

        async def generate(prompts: Sequence[str]) -> tuple[list[str], int]:
            generations = await asyncio.gather(*(pool.generate(text, 0, rounds.template.stop) for text in prompts))
            return [made.text for made in generations], sum(len(made.completion_ids) for made in generations)

        await _answer(questioner, rounds, generate)


async def measure_vllm(questioner: Questioner, config: Config, next_spec: Callable[[], GameSpec]) -> None:
    """Measure with `LLM.generate` in this process, as in the first example of its documentation."""
    engine, rounds = config.engine, Rounds(next_spec, questioner.arguments["games"])
    lora = {"enable_lora": True, "max_loras": engine.max_loras, "max_lora_rank": config.lora.lora_rank}
    llm = offline_llm.load(
        resolve_model(config.model_name),
        "cpu",
        kv_cache_gb=math.ceil(engine.kv_cache_gb),
        max_model_len=engine.max_model_len,
        max_num_seqs=questioner.arguments["games"],
        enforce_eager=questioner.arguments["eager"],
        seed=config.run.seed,
        **(lora if questioner.arguments["lora"] else {}),
    )
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=engine.temperature, max_tokens=engine.max_generation_len, stop=list(rounds.template.stop)
    )

    async def generate(prompts: Sequence[str]) -> tuple[list[str], int]:
        made = [output.outputs[0] for output in llm.generate(list(prompts), params, use_tqdm=False)]
        return [one.text for one in made], sum(len(one.token_ids) for one in made)

    await _answer(questioner, rounds, generate)


async def _answer(questioner: Questioner, rounds: Rounds, generate: GenerateAll) -> None:
    questioner.answer({})
    for request in questioner.requests():
        turns, tokens, started = 0, 0, time.perf_counter()
        while turns == 0 or time.perf_counter() - started < request["seconds"]:
            more_turns, more_tokens = await rounds.play_one(generate)
            turns, tokens = turns + more_turns, tokens + more_tokens
        seconds = time.perf_counter() - started
        questioner.answer(
            {"turns_per_s": turns / seconds, "tokens_per_s": tokens / seconds, "memory_mb": memory_mb("now")}
        )
