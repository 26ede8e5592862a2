"""UnstableBaselines' standard script: the calls of it that differ from ours, and the errors for Ray's.

A run makes tracker, collector and learner itself. Called as the script calls them, they keep their arguments until
`train`, which makes the run. Knows none of the classes that the script calls.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

from unstable_lite import plugins
from unstable_lite.errors import ConfigError

T = TypeVar("T")

POSITIONS = ("env_id", "num_players", "num_actors", "prompt_template", "action_extraction_fn", "fixed_opponent")
"""Order of the arguments of both specs of an env; each lacks one of them."""
TRACKER = inspect.signature(lambda run_name, wandb_project=None: 0)  # noqa: ARG005
COLLECTOR = inspect.signature(lambda vllm_config, tracker, buffer, game_scheduler: 0)  # noqa: ARG005
LEARNER = inspect.signature(
    lambda model_name, lora_cfg, batch_size, mini_batch_size, learning_rate, grad_clip, buffer, tracker,  # noqa: ARG005
    model_registry, activation_checkpointing=True, gradient_checkpointing=True, use_trainer_cache=False,  # noqa: ARG005
    initial_lora_path=None: 0  # noqa: ARG005
)  # fmt: skip


def from_reference(
    unused: Collection[str] = (), renamed: Mapping[str, str] | None = None, kept: inspect.Signature | None = None
) -> Callable[[type[T]], type[T]]:
    """Return a decorator for a class that the script calls. Ray's `options` and `remote` raise ConfigError.

    unused: keywords to leave out. renamed: other keywords, with their names here. kept: signature of the script's call,
    if the run makes the part itself.
    """

    def decorate(part: type[T]) -> type[T]:
        init: Callable[..., None] = part.__init__
        of_script = set(kept.parameters if kept else ()) - {*inspect.signature(init).parameters}

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            own = type(self)
            if kept and of_script & given.keys():
                if getattr(sys.modules.get("ray"), "is_initialized", bool)():
                    raise ConfigError("ray.init: no part of a run is an actor of Ray's; remove each line with `ray.`")
                try:
                    arguments = kept.bind(*args, **given)
                except TypeError as error:
                    raise ConfigError(f"{own.__name__}: {error}") from None
                arguments.apply_defaults()
                self.__class__ = Kept  # `__new__` would hide the signature, by which plugins' keywords are checked
                self.given = {"algorithm": own, **arguments.arguments}
                return
            if args and (fields := getattr(own, "model_fields", None)):
                of_spec = dict(zip((key for key in POSITIONS if key in fields), args, strict=False))
                raise ConfigError(f"a spec takes keywords only; write {_line(own.__name__, (), of_spec | given)}")
            names = renamed or {}
            init(self, *args, **{names.get(key, key): value for key, value in given.items() if key not in unused})

        setattr(part, "__init__", checked)  # noqa: B010
        methods = [(name, one) for name, one in vars(part).items() if inspect.isfunction(one) and name[0] != "_"]
        for name, one in [(part.__name__, part), *methods]:
            for word in ("options", "remote"):
                setattr(one, word, staticmethod(functools.partial(_refuse_ray, name, word)))
        return part

    return decorate


def _refuse_ray(name: str, word: str, /, *args: Any, **given: Any) -> NoReturn:
    line = _line(name, args, given) if word == "remote" else f"{name}(…)"
    raise ConfigError(f"{name}.{word}: no part of a run is an actor of Ray's; write {line}")


def _line(name: str, args: Collection[Any], given: Mapping[str, Any]) -> str:
    return f"{name}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in given.items())])})"


@from_reference()
class Kept:
    """Tracker, collector or learner of the script, before the run makes its own."""

    given: dict[str, Any]

    def get_log_dir(self) -> None:
        """Return None, because there is no run directory yet."""

    def collect(self, num_train_workers: int, num_eval_workers: int = 0) -> None:
        workers = {"num_collection_workers": num_train_workers, "num_eval_workers": num_eval_workers}
        self.given["tracker"].given["collector"] = {**self.given, "workers": workers}

    def initialize_algorithm(self, **options: Any) -> None:
        self.given["options"] = options

    def train(self, iterations: int) -> Any:
        """Make the run, wait for its end and return its summary."""
        build_script: Any = plugins.find("script", "unstable_lite.api:build_script", {})
        return build_script(self.given).start(iterations)
