"""An environment of `verifiers` 0.3 (Prime Intellect) as a game of one player; examples/verifiers.toml uses it.

`env_kwargs = { name = "my_env", hints = 2 }` plays in `load_environment("my_env", hints=2)`, on the rows of its eval
dataset with `eval_dataset = true`. The rollout loop of verifiers runs unchanged in an event loop of its own; it asks a
client for answers, which waits for those of our policy. docs/games.md says which environments cannot be used.
"""

import asyncio
import contextlib
import json
import queue
import random
import signal
import threading
import types
import weakref
from functools import cache
from typing import Any

import textarena as ta

from unstable_lite.errors import ConfigError, EnvError

try:  # all at once, because the imports take seconds, and the start of a game has a time limit
    from verifiers import JudgeRubric, MultiTurnEnv, OpenAIChatCompletionsClient, ToolEnv, load_environment
    from verifiers.envs import environment as vf_environment
    from verifiers.types import Messages, Response, ResponseMessage
except ImportError as error:
    raise ConfigError(f"verifiers_env: {error}; pip install 'unstable-lite[verifiers]' has version 0.3") from error

# An environment of verifiers would handle SIGINT and SIGTERM, which stop a run.
vf_environment.signal = types.SimpleNamespace(**vars(signal) | {"signal": lambda *_: None})


def whole_answer(text: str) -> tuple[str, bool]:
    """Return the answer as it is: the environment's own parser reads it."""
    return text, True


class _Policy(OpenAIChatCompletionsClient):
    """Client of one rollout: passes its prompts to the game, and the game's actions to it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts: queue.SimpleQueue[Messages | None] = queue.SimpleQueue()  # None: the rollout is over
        self.actions: asyncio.Queue[str] = asyncio.Queue()

    async def get_response(self, prompt: Messages, model: str, *_: Any, **__: Any) -> Response:
        self.prompts.put(prompt)
        message = ResponseMessage(content=await self.actions.get(), finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model=model, message=message)


class VerifiersEnv(ta.Env):
    def __init__(self, name: str, eval_dataset: bool = False, **arguments: Any) -> None:
        self._environment = _load(name, json.dumps(arguments))
        self._rows = self._environment.get_eval_dataset() if eval_dataset else self._environment.get_dataset()

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = ta.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset()
        row = self._rows[random.randrange(len(self._rows))]  # from the game's random stream
        self._policy = policy = _Policy()
        rollout = self._environment.run_rollout(row, policy, "policy", {})
        self._rollout = asyncio.run_coroutine_threadsafe(rollout, _event_loop())
        self._rollout.add_done_callback(lambda _: policy.prompts.put(None))
        weakref.finalize(self, self._rollout.cancel)  # a game may be abandoned
        self._continue()

    def get_observation(self) -> tuple[int, str]:
        return 0, self._prompt

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        _event_loop().call_soon_threadsafe(self._policy.actions.put_nowait, action)
        self._continue()
        return self.state.step()

    def _continue(self) -> None:
        """Wait until the rollout asks for an answer, or ends."""
        while True:
            with contextlib.suppress(queue.Empty):
                prompt = self._policy.prompts.get(timeout=0.5)  # run.env_timeout_s could not interrupt a longer wait
                break
        if prompt is not None:
            self._prompt = "\n\n".join(_text(message) for message in prompt)
            return
        result = self._rollout.result()
        if result["error"] is not None:
            raise EnvError(f"the rollout failed: {result['error']}")  # of a service: not the policy's fault
        self.state.set_outcome(result["reward"], reason=result["stop_condition"])
        self.state.game_info[0]["metrics"] = result["metrics"]


def _text(message: Any) -> str:
    parts = [message.content] if isinstance(message.content, str) else [part.get("text") for part in message.content]
    if None in parts:
        raise ValueError("a prompt has an image or sound, and a policy here reads text")
    return "[your answer] " * (message.role == "assistant") + " ".join(parts)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


@cache
def _load(name: str, arguments: str) -> MultiTurnEnv:
    environment = load_environment(name, **json.loads(arguments))
    rubrics = getattr(environment.rubric, "rubrics", [environment.rubric])
    for is_unsuitable, reason in (
        (not isinstance(environment, MultiTurnEnv), "it is neither a MultiTurnEnv nor a SingleTurnEnv"),
        (isinstance(environment, ToolEnv) or environment.tool_defs, "it has tools, and an answer here is text"),
        (any(isinstance(rubric, JudgeRubric) for rubric in rubrics), "its rubric asks a model to judge"),
        (environment.requires_group_rollouts, "its rubric compares rollouts, and each game here is scored alone"),
    ):
        if is_unsuitable:
            raise ValueError(f"the environment {name!r} of verifiers cannot be used: {reason}")
    return environment


ta.envs.registration.register(id="Verifiers-v0", entry_point="verifiers_env:VerifiersEnv")
