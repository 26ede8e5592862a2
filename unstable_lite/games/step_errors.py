"""Tell an action that an env's `step` cannot handle from a failure of the world outside of the game.

Also owns the base class of the games of this process, which play every action under that rule.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from multiprocessing import ProcessError

from unstable_lite.errors import EnvRaised, UnstableError, described, is_out_of_memory

_CLIENTS = re.compile(
    r"(http|httpx|httpcore|aiohttp|requests|urllib3|websockets?|grpc|pycurl|zmq|redis|tenacity|huggingface_hub|botocore"
    r"|azure|google|openai|openrouter|anthropic|mistralai|groq|cohere|together|litellm|ollama|replicate|xai_sdk)(\.|$)"
)
"""Names of packages that talk to a server."""
_NAMES = re.compile(
    "Timeout|TimedOut|Connect(?!Four|4)|Network(?!X)|RateLimit|TooManyRequests|Unavailable|ServerError|HTTP|A(PI|pi(?=E))"
)
"""Names of exceptions that an env made by itself of those of a client."""


def reason_of(error: BaseException) -> str:
    """Return the reason of a void game that `error` ended; "failed" if no error of its chain is known."""
    return next(filter(None, map(_known_reason, _chain(error))), "failed")


def _known_reason(error: BaseException) -> str:
    if isinstance(error, UnstableError):
        return error.reason
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
        return "timeout"
    if isinstance(error, EOFError | BrokenExecutor | ProcessError | subprocess.SubprocessError):
        return "process_died"
    is_client_s = any(_CLIENTS.match(base.__module__) for base in type(error).__mro__)
    if is_client_s or isinstance(error, ConnectionError) or _NAMES.search(type(error).__name__):
        return "network"
    return "os_error" if isinstance(error, OSError) else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, those in its group, and those that it was raised from or while they were handled."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for member in error.exceptions:
                yield from _chain(member)
        error = error.__cause__ or error.__context__


class _StepErrors:
    """Context of a call of an env's `step`. Raises EnvRaised for an exception that only the action explains."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, UnstableError) or not isinstance(error, Exception | SystemExit):  # argparse exits
            return
        if reason_of(error) == "failed":
            raise EnvRaised(described(error)) from error


STEP_ERRORS = _StepErrors()


class LocalGame:
    """Base class of the games of this process: a subclass has `observe` and `step`."""

    def observe(self) -> tuple[int, str]:
        """Return the current player and its observation."""
        raise NotImplementedError

    def step(self, action: str) -> bool:
        """Play `action` for the current player; return whether the game is over."""
        raise NotImplementedError

    def play(self, action: str) -> tuple[int, str] | None:
        """Call `step`, and `observe` unless the game is over."""
        with STEP_ERRORS:
            is_over = self.step(action)
        return None if is_over else self.observe()

    async def advance(self, action: str) -> tuple[int, str] | None:
        """Call `play`. It is async because an isolated env, used in the same way, waits for its process."""
        return self.play(action)

    def drop(self) -> None:
        """Abandon the game, finished or not; an env in another process is dropped there, too."""
