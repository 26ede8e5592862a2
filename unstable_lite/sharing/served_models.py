"""The models of a server: checkpoints of a run and its base, on the run's kind of engine, and how they are asked.

A served model is asked as in training. The text that this package's endpoint players send (the template `chat` around
an observation), and a message with `num_players`, become the prompt of the run's own template; a conversation is laid
out by the tokenizer's chat template. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import ConfigError, ModelError, RequestError, WorkerDied
from unstable_lite.evaluation.loaded_adapters import AdapterSlots
from unstable_lite.evaluation.models import BASE_MODEL, EvaluatedModel, check_base
from unstable_lite.evaluation.plan import plan_engines
from unstable_lite.games.players.policy import Generates
from unstable_lite.games.players.thinking_budget import thinking_budget
from unstable_lite.games.templates import (
    CHAT_TEMPLATES,
    ChatTemplate,
    known_templates,
    templates_for,
    without_markup,
)
from unstable_lite.models import resolve_model
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.orchestrator.logs import log_file
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.orchestrator.workers import EngineWorkers, started_engines, while_alive
from unstable_lite.planning.plan import Plan, checked_config
from unstable_lite.planning.trust import run_config
from unstable_lite.rng import derive_seed
from unstable_lite.sharing.checkpoints import LAST, find_checkpoint
from unstable_lite.sharing.openai_format import ChatRequest, CompletionRequest, Refusal, SamplingRequest
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.types import BASE, Generation, Sampling, TokenIds

CHECK_PROMPT = "Your move:"
"""Prompt of the check that adapters answer differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    plan: Plan
    models: dict[str, EvaluatedModel]
    """Models by the name that requests give."""
    template: str
    """Name of the prompt template of observations."""


def plan_serving(
    run: Path,
    checkpoints: Sequence[str] = (),
    name: str | None = None,
    template: str | None = None,
    overrides: Sequence[str] = (),
    trusts_config: bool = False,
) -> ServingPlan:
    """Return a plan to serve checkpoints of a run, by default the last one, and its base. Raises ConfigError.

    name: of the only checkpoint, in requests. template: of observations; default: that of the run's first training env.
    """
    found = [find_checkpoint(run, which) for which in checkpoints or (LAST,)]
    models = {model.name: model for model in found}
    if name is not None:
        if len(models) > 1:
            raise ConfigError(f"--name {name}: {len(models)} checkpoints are served; leave it out, or name one of them")
        models = {name: found[0]}
    if BASE in models:
        raise ConfigError(f"--name {BASE}: the model without an adapter has this name; choose another")
    config = checked_config(run_config(run, overrides, trusts_config), overrides)
    env = config.train_envs[0]
    if template is not None:
        env = env.model_copy(update={"prompt_template": template})
    slots = max(config.engine.max_loras, len(models))
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"max_loras": slots})})
    plan = plan_engines(config, check_base(found, config), env)
    return ServingPlan(plan=plan, models={**models, BASE: BASE_MODEL}, template=env.prompt_template)


class Prompt(NamedTuple):
    text: str
    """Text, which is empty if there are `ids`."""
    stop: tuple[str, ...] = ()
    opened: str = ""
    """End of the prompt that belongs to the answer: `<think>`, or empty."""
    ids: TokenIds | None = None
    is_observation: bool = False
    """Whether it was made by the run's template."""


class ServedModels:
    def __init__(self, serving: ServingPlan, workers: EngineWorkers, slots: AdapterSlots, tokenizer: Tokenizer) -> None:
        config = serving.plan.config
        self.models = serving.models
        self.max_model_len: int = workers.info["max_model_len"]
        self.engines = workers.engines
        self._vocab_size: int = workers.info["vocab_size"]
        self._config = config.engine
        self._slots = slots
        self._tokenizer = tokenizer
        self._template = templates_for(config, workers.prompts)[serving.template]
        known = known_templates(config.templates)[serving.template]
        self._thinks = known.thinking if isinstance(known, ChatTemplate) else True
        self._thinking = thinking_budget(config.engine, workers.info)
        self._started_at = int(time.time())

    async def prompt(self, request: SamplingRequest) -> Prompt:
        """Return the prompt of a request. Raises Refusal if it is of an unknown model, too long, or cannot be made."""
        if request.model not in self.models:
            raise Refusal(
                404, f"there is no model {request.model!r}; served: {', '.join(self.models)}", "model_not_found"
            )
        # Long texts take a while.
        prompt, num_tokens = await asyncio.to_thread(self._prompt, request)
        if num_tokens >= self.max_model_len:
            raise Refusal(
                400,
                f"the prompt has {num_tokens} tokens, and prompt and answer together may have {self.max_model_len} "
                "(engine.max_model_len)",
                "context_length_exceeded",
            )
        return prompt

    def _prompt(self, request: SamplingRequest) -> tuple[Prompt, int]:
        if isinstance(request, ChatRequest):
            prompt = self._of_messages(request)
        else:
            assert isinstance(request, CompletionRequest)
            if isinstance(request.prompt, str):
                prompt = Prompt(request.prompt)
            elif not all(0 <= token_id < self._vocab_size for token_id in request.prompt):
                raise Refusal(400, f"the prompt has token ids outside of 0 to {self._vocab_size - 1}")
            else:
                prompt = Prompt("", ids=np.array(request.prompt, np.int32))
        return prompt, len(self._tokenizer.encode(prompt.text) if prompt.ids is None else prompt.ids)

    def _of_messages(self, request: ChatRequest) -> Prompt:
        (*earlier, last), num_players = request.messages, request.num_players
        asked = (last.text, num_players) if num_players else None
        if asked is not None and (earlier or last.role != "user"):
            raise Refusal(400, "with num_players there is one message, the user's: the observation")
        if not earlier and last.role == "user":
            asked = asked or CHAT_TEMPLATES["chat"].observation_in(last.text)
        if asked is not None:
            template = self._template
            return Prompt(template.prompt(*asked), template.stop, template.opened_thinking, is_observation=True)
        messages = [
            {
                "role": "system" if one.role == "developer" else one.role,
                "content": self._without_markup(one.role, one.text),
            }
            for one in request.messages
        ]
        try:
            return Prompt(*self._tokenizer.conversation(messages, self._thinks))
        except ModelError as error:
            raise Refusal(
                400, f"{error}. Send an observation with num_players, or use /v1/completions, which need none"
            ) from None

    def _without_markup(self, role: str, text: str) -> str:
        """Break markup in the user's text, as in observations, so that it cannot end the user's turn."""
        return without_markup(text, self._template.markup) if role == "user" else text

    async def answer(
        self, request: SamplingRequest, prompt: Prompt, index: int, on_text: Callable[[str], None] | None = None
    ) -> Generation:
        """Return one choice of an answer; `on_text` is called with its parts, if the engine streams.

        Raises Refusal if no engine can answer now.
        """
        engines, config = self.engines, self._config
        if not engines.up:
            raise Refusal(503, "the engine has died and is started again; try again in a while")
        sampling = Sampling(temperature=request.temperature, top_p=request.top_p)
        generate: Generates = partial(engines.choose(engines.up).generate, sampling=sampling)
        limit, thinking = request.limit or config.max_generation_len, self._thinking
        if thinking is not None and prompt.is_observation and limit > thinking.thinking_tokens:
            generate = partial(replace(thinking, max_tokens=limit).generate, generate, prompt.opened)
        else:
            generate = partial(generate, max_tokens=limit, prompt_ids=prompt.ids, on_text=on_text)
        version = self._slots.ref(self.models[request.model]).adapter_version or 0
        seed = None if request.seed is None else derive_seed(request.seed, index)
        stop = tuple(dict.fromkeys((*prompt.stop, *request.stops)))
        try:
            return await generate(prompt.text, version, stop, seed)
        except WorkerDied:
            raise Refusal(
                503, "the engine died while it answered, and is started again; try again in a while"
            ) from None
        except RequestError as error:
            raise Refusal(503, f"the engine failed: {error}") from None

    def listed(self) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`."""
        shared = {"object": "model", "created": self._started_at, "owned_by": "unstable_lite"}
        return [
            {"id": name, "parent": None if name == BASE else BASE, "max_model_len": self.max_model_len, **shared}
            for name in self.models
        ]


@asynccontextmanager
async def started_models(serving: ServingPlan, say: Callable[[str], None]) -> AsyncIterator[ServedModels]:
    """Start the engines and load the adapters; restart an engine that dies.

    The caller's task is cancelled, and WorkerDied raised, if an engine dies more often than `run.max_restarts`. Raises
    AdapterError for an adapter that does not fit or does not seem to be in use.
    """
    config = serving.plan.config
    path = resolve_model(config.model_name)
    with tempfile.TemporaryDirectory(prefix="unstable-lite-serve-") as directory, log_file(Path(directory) / "log"):
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(asyncio.to_thread(Tokenizer, path, config.trust_remote_code))
            # As after a restart: other random streams than those of the run and of the last server.
            async with started_engines(serving.plan, Path(directory), say, is_restart=True) as workers:
                slots = AdapterSlots(workers, config.engine.max_loras, CHECK_PROMPT)
                adapters = {model.key: model for model in serving.models.values() if model.adapter is not None}
                await while_alive(workers.processes, slots.hold(adapters))
                tokenizer = await loading
                supervising = [
                    tasks.create_task(_supervisor(process, engine, config, slots, say).run())
                    for process, engine in zip(workers.processes, workers.engines.engines, strict=True)
                ]
                yield ServedModels(serving, workers, slots, tokenizer)
                for task in supervising:
                    task.cancel()


def _supervisor(
    process: WorkerProcess, engine: EngineClient, config: Config, slots: AdapterSlots, say: Callable[[str], None]
) -> Supervisor:
    return Supervisor(
        process,
        config.run,
        config.engine.start_timeout_s,
        config.engine.stall_timeout_s,
        restore=partial(slots.restore, engine),
        alarm=say,
    )
