"""The messages between the orchestrator and its workers, and their bytes.

Dataclasses, frozen but for the two of every turn (see types.py), packed with msgpack as
`[PROTOCOL, [[tag, field, …], …]]`: many messages in one frame, so that what queues up travels together. Token arrays
are little-endian `bin`, not lists. Every request carries a `request_id` and gets exactly one reply with the same id:
the reply that its docstring names, or `Failed`.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgpack
import msgspec
import numpy as np

from unstable_lite.errors import ProtocolError
from unstable_lite.types import FinishReason, Generation, Histogram, LearnerLogprobs, Logprobs, TokenIds, TrainItem

T = TypeVar("T")

PROTOCOL = 7
MAX_FRAME_BYTES = 1 << 30
MAX_ITEMS = 1 << 20
"""Of one list or table. What a frame claims to hold is not believed before it is read: room is made for so many."""
MAX_LEVELS = 16
"""Of tables and lists within each other, where a field may hold anything."""
INT64_MAX = (1 << 63) - 1


@dataclass(slots=True, kw_only=True)
class Generate:
    """Ask an engine for one completion. Reply: `Generated`."""

    request_id: int
    prompt: str
    adapter_version: int
    """0 is the base."""
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    """Stop strings besides the model's end-of-sequence tokens."""
    seed: int | None
    """Seed of this request's own random stream; None draws from the engine's."""


@dataclass(slots=True, kw_only=True)
class Generated:
    request_id: int
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Load a PEFT directory under a version that was never used before. Reply: `AdapterDigest` of what was read."""

    request_id: int
    version: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmAdapter:
    """Ask an engine whether it still holds what it read as `version`. Reply: `AdapterDigest`."""

    request_id: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDigest:
    """Which adapter a worker wrote, read or holds, as `outside_files.digest_of` computes it."""

    request_id: int
    seconds: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadAdapter:
    """Forget a version; no request may use it again. Reply: `Done`."""

    request_id: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Answer what was asked, then give the device's memory back until `WakeUp`. Reply: `Done`."""

    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUp:
    """Take the memory again; adapters are as they were. Reply: `Done`."""

    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser step on a batch, then write the new adapter to `path`. Reply: `Updated`."""

    request_id: int
    items: tuple[TrainItem, ...]
    version: int
    """The adapter version that this update makes."""
    path: str
    state_path: str
    """A new directory for the learner's whole state, written before the reply; see `LoadLearner`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    request_id: int
    metrics: dict[str, float]
    skipped: str | None
    """Why nothing was learnt and nothing published (a non-finite loss or gradient), or None."""
    logprobs: tuple[Logprobs, ...] = ()
    """For each item, those of its trained tokens before the step; only with `tracker.keep_tokens`."""
    histograms: tuple[Histogram, ...] = ()
    """Of this update; none if the first reply was lost, and this is the second one."""
    digest: str = ""
    """Of the adapter that was written; empty if the update was skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Write the adapter that training starts from to `path`, as `version`. Reply: `AdapterDigest`."""

    request_id: int
    version: int
    path: str
    state_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The learner's own log-probabilities of the items' completion tokens. Reply: `Scored`."""

    request_id: int
    items: tuple[TrainItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    request_id: int
    logprobs: tuple[LearnerLogprobs, ...]
    """In the order of the items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLearner:
    """Write adapter and optimiser state into the directory `path`, which exists. Reply: `Done`."""

    request_id: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTune:
    """Train an adapter on the pairs of the file `pairs`, write it into the directory `output`. Reply: `FineTuned`."""

    request_id: int
    pairs: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuned:
    request_id: int
    figures: dict[str, float]
    left_out: dict[str, int]
    """Pairs that were not trained on, by the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """How far a `FineTune` has got; unasked."""

    update: int
    total: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLearner:
    """Go on from a directory that `SaveLearner`, `Update` or `Publish` wrote. Reply: `Done`.

    If the update that it is of is asked for again, its reply was lost: the same reply is given, and nothing done.
    """

    request_id: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeEnv:
    """Make and reset an env for a new game. Reply: `EnvState`."""

    request_id: int
    game: int
    env_id: str
    num_players: int
    seed: int
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnv:
    """Play one action. Reply: `EnvState`."""

    request_id: int
    game: int
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEnv:
    """Forget a game. No reply."""

    game: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    """What comes next in a game: somebody's turn, or its result."""

    request_id: int
    is_over: bool
    was_invalid: bool
    """The rules do not allow the last action."""
    has_teams: bool
    """Its players win and lose together."""
    pid: int
    """Whose turn it is, and below what that player sees; not set when the game is over."""
    observation: str
    rewards: tuple[float, ...]
    """Reward of each player. Before the end of the game: the rewards if it were truncated now."""
    game_info: str
    """The env's remarks as JSON; set when the game is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    request_id: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The reply to a request that could not be served; the worker itself is well."""

    request_id: int
    error: str
    is_no_room: bool = False
    """What it should have written finds no room where it was to be written; elsewhere it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker's first message. `facts` is shown at start-up and read by the runtime (see each worker)."""

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Unasked, about once a second while there is work."""

    queued: int
    running: int
    tokens_per_s: float
    cached_share: float
    """Share of prompt tokens that came from the prefix cache since the last report."""
    oom_retries: int = 0
    """Steps that the engine did again with fewer requests because memory had run out, since it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """A worker's last message: it cannot go on."""

    error: str
    is_final: bool
    """Another one in its place would end in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker on another machine offers itself. Reply, as soon as a place is free: `Welcome`."""

    host: str
    device: str
    run_token: str
    """Of the run that its engine was made for; empty: it has none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """A place for a worker on another machine. Reply: `Ready`, when its engine is made."""

    name: str
    run_token: str
    """Of the process that runs the run: another one may give the same adapter versions to other weights."""
    config_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchAdapter:
    """A worker on another machine asks for the next bytes of an adapter that it is to load. Reply: `AdapterPart`."""

    version: int
    file: int
    """Index among the adapter's files in the order of their names."""
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    version: int
    file: int
    offset: int
    name: str
    """Of the file; empty: there is no such adapter any more."""
    data: bytes
    is_end_of_file: bool
    is_end: bool
    """It was the last file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """To a worker on another machine, again and again: where it cannot be sent, the worker is gone. No reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """To a worker on another machine: it was given up; it may say `Hello` again. No reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Ask a worker to end. No reply: its exit is the answer."""


Message = (
    Generate
    | Generated
    | LoadAdapter
    | ConfirmAdapter
    | AdapterDigest
    | UnloadAdapter
    | Sleep
    | WakeUp
    | Update
    | Updated
    | Publish
    | Score
    | Scored
    | SaveLearner
    | LoadLearner
    | FineTune
    | FineTuned
    | FineTuning
    | MakeEnv
    | StepEnv
    | DropEnv
    | EnvState
    | Done
    | Failed
    | Ready
    | EngineStats
    | Crashed
    | Hello
    | Welcome
    | FetchAdapter
    | AdapterPart
    | Alive
    | Rejoin
    | Stop
)

REPLIES: dict[Any, Any] = {
    Generate: Generated,
    LoadAdapter: AdapterDigest,
    ConfirmAdapter: AdapterDigest,
    UnloadAdapter: Done,
    Sleep: Done,
    WakeUp: Done,
    Update: Updated,
    Publish: AdapterDigest,
    Score: Scored,
    SaveLearner: Done,
    LoadLearner: Done,
    FineTune: FineTuned,
    MakeEnv: EnvState,
    StepEnv: EnvState,
}
"""What answers a request, if it is not `Failed`."""

_Convert = Callable[[Any], Any]

SAME_LENGTH: dict[Any, tuple[str, str]] = {
    Generation: ("logprobs", "completion_ids"),
    TrainItem: ("logprobs", "completion_ids"),
    LearnerLogprobs: ("adapter", "base"),
}
"""Fields that speak of the same tokens."""


_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_DTYPES: dict[Any, np.dtype[Any]] = {TokenIds: _INT32, Logprobs: _FLOAT32}


def _identity(value: Any) -> Any:
    return value


def _packer(hint: Any) -> _Convert:
    """From a field's Python value to what msgpack takes."""
    if hint in (TokenIds, Logprobs):
        little_endian = _DTYPES[hint]
        return lambda array: array.astype(little_endian, copy=False).tobytes()
    if _is_record(hint):
        return _record_packer(hint)
    if (record := _optional_record(hint)) is not None:
        pack_record = _record_packer(record)
        return lambda value: None if value is None else pack_record(value)
    if get_origin(hint) is tuple and (pack_item := _packer(get_args(hint)[0])) is not _identity:
        return lambda items: [pack_item(item) for item in items]
    return _identity


def _is_record(hint: Any) -> bool:
    """Return whether `hint` is a dataclass or a Struct."""
    return is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct))


def _optional_record(hint: Any) -> Any:
    """Return the record type of a hint `Record | None`, or None for any other hint."""
    if get_origin(hint) is not UnionType:
        return None
    return next((choice for choice in get_args(hint) if _is_record(choice)), None)


def _names(cls: Any) -> list[str]:
    return list(cls.__struct_fields__) if issubclass(cls, msgspec.Struct) else [f.name for f in fields(cls)]


def _record_packer(cls: Any, *tag: str) -> _Convert:
    """To `[tag, field, …]`."""
    hints, names = get_type_hints(cls), _names(cls)
    all_packers = [(at, _packer(hints[name])) for at, name in enumerate(names, len(tag))]
    packers = [(at, pack_field) for at, pack_field in all_packers if pack_field is not _identity]
    # Of less than two names `attrgetter` makes no tuple.
    values_of = attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]

    def pack(value: Any) -> list[Any]:
        packed = [*tag, *values_of(value)]
        for at, pack_field in packers:
            packed[at] = pack_field(packed[at])
        return packed

    return pack


def _unpacker(hint: Any, where: str) -> tuple[tuple[type, ...], _Convert | None]:
    """What msgpack must give for a field of this type, and what makes the value of it (None: it is the value)."""
    if hint in (TokenIds, Logprobs):
        return (bytes,), _array_unpacker(_DTYPES[hint], where)
    if _is_record(hint):
        return (list,), _record_unpacker(hint, where)
    if (record := _optional_record(hint)) is not None:
        unpack_record = _record_unpacker(record, where)
        return (list, NoneType), lambda value: None if value is None else unpack_record(value)
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return (list,), _items_unpacker(args[0], where)
    if origin is dict:
        return (dict,), _dict_unpacker(args[1], where)
    if origin is UnionType:
        return args, partial(_small, where) if int in args else None
    if origin is Literal:
        return (str,), partial(_one_of, args, where)
    if hint is int:
        return (int,), partial(_small, where)
    return ((float, int), float) if hint is float else ((hint,), None)


def _array_unpacker(dtype: np.dtype[Any], where: str) -> _Convert:
    def unpack(value: bytes) -> Any:
        if len(value) % 4:
            raise ProtocolError(f"{where}: {len(value)} bytes are not a whole number of 4-byte items")
        return np.frombuffer(value, dtype)

    return unpack


def _items_unpacker(hint: Any, where: str) -> _Convert:
    kinds, convert = _unpacker(hint, where)

    def unpack(items: list[Any]) -> tuple[Any, ...]:
        for item in items:
            if type(item) not in kinds:
                raise ProtocolError(f"{where}: an item is {type(item).__name__} where {kinds} is expected")
        return tuple(items) if convert is None else tuple(map(convert, items))

    return unpack


def _dict_unpacker(hint: Any, where: str) -> _Convert:
    if hint is Any:
        return partial(_plain, where)
    unpack_items = _items_unpacker(hint, where)
    return lambda table: dict(zip(table, unpack_items(list(table.values())), strict=True))


def _small(where: str, value: int | None) -> int | None:
    """msgpack has integers up to 2**64; ours are 64 bits with a sign."""
    if value is not None and value > INT64_MAX:
        raise ProtocolError(f"{where}: {value} is more than 64 bits with a sign")
    return value


def _one_of(choices: tuple[str, ...], where: str, value: str) -> str:
    if value not in choices:
        raise ProtocolError(f"{where}: {value[:40]!r} is none of {choices}")
    return value


def _plain(where: str, value: Any, levels: int = MAX_LEVELS) -> Any:
    """What JSON has, too; nothing else, and not nested without end."""
    kind = type(value)
    if kind is int:
        return _small(where, value)
    if kind in (str, float, bool, NoneType):
        return value
    if kind not in (list, dict) or levels == 0:
        raise ProtocolError(f"{where}: {kind.__name__} within {MAX_LEVELS - levels} tables or lists")
    for inner in value.values() if kind is dict else value:
        _plain(where, inner, levels - 1)
    return value


def _record_unpacker(cls: Any, where: str) -> _Convert:
    hints = get_type_hints(cls)
    plan = [(name, *_unpacker(hints[name], f"{where}.{name}")) for name in _names(cls)]
    one, other = SAME_LENGTH.get(cls, ("", ""))

    def unpack(values: list[Any]) -> Any:
        if len(values) != len(plan):
            raise ProtocolError(f"{where}: expected {len(plan)} fields, got {len(values)}")
        arguments = {}
        for (name, kinds, convert), value in zip(plan, values, strict=True):
            if type(value) not in kinds:
                raise ProtocolError(f"{where}.{name}: {type(value).__name__} where {kinds} is expected")
            arguments[name] = value if convert is None else convert(value)
        if one and len(arguments[one]) != len(arguments[other]):
            raise ProtocolError(f"{where}: {len(arguments[one])} {one}, {len(arguments[other])} {other}")
        return cls(**arguments)

    return unpack


def pack_all(cls: type[T], values: Iterable[T]) -> bytes:
    """Records of one kind as bytes, with the same care for token arrays."""
    pack_value = _packer(cls)
    return _close([pack_value(value) for value in values])


def unpack_all(cls: type[T], content: bytes) -> list[T]:
    """What `pack_all` packed. Raises ProtocolError for anything else."""
    return list(_items_unpacker(cls, cls.__name__)(_open(content)))


_CLASSES: tuple[Any, ...] = get_args(Message)
_PACKERS = {cls: _record_packer(cls, cls.__name__) for cls in _CLASSES}
_UNPACKERS = {cls.__name__: _record_unpacker(cls, cls.__name__) for cls in _CLASSES}


def encode(messages: Iterable[Message]) -> bytes:
    """All of `messages` in one frame.

    Raises ProtocolError for what no frame can hold: text that is not Unicode, too large a number, too many bytes.
    """
    return _close([_PACKERS[type(message)](message) for message in messages])


_Int = Annotated[int, msgspec.Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]


class _Generation(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    prompt_ids: bytes
    completion_ids: bytes
    logprobs: bytes
    text: str
    finish_reason: FinishReason
    adapter_version: _Int

    def unpacked(self) -> Generation:
        """Raises ValueError if its arrays are none."""
        completion_ids = np.frombuffer(self.completion_ids, _INT32)
        logprobs = np.frombuffer(self.logprobs, _FLOAT32)
        if len(completion_ids) != len(logprobs):
            raise ValueError("not a log-probability for each token")
        return Generation(
            prompt_ids=np.frombuffer(self.prompt_ids, _INT32),
            completion_ids=completion_ids,
            logprobs=logprobs,
            text=self.text,
            finish_reason=self.finish_reason,
            adapter_version=self.adapter_version,
        )


class _Generated(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag="Generated"):
    request_id: _Int
    generation: _Generation


_Answers = tuple[
    Annotated[int, msgspec.Meta(ge=PROTOCOL, le=PROTOCOL)],
    Annotated[list[_Generated], msgspec.Meta(max_length=MAX_ITEMS)],
]
_ANSWERS = msgspec.msgpack.Decoder(_Answers)
"""Of a frame with nothing but an engine's answers, which every turn of a game brings."""


def decode(frame: bytes) -> list[Message]:
    """The messages of one frame.

    Raises ProtocolError if the bytes are not ours: malformed, oversized, of another protocol version, or with
    fields of a wrong type.
    """
    if len(frame) <= MAX_FRAME_BYTES:
        with contextlib.suppress(ValueError):  # a frame of anything else, or of nothing of ours: as below
            _, answers = _ANSWERS.decode(frame)
            return [
                Generated(request_id=answer.request_id, generation=answer.generation.unpacked()) for answer in answers
            ]
    messages = []
    for item in _open(frame):
        known = type(item) is list and item and type(item[0]) is str and item[0] in _UNPACKERS
        if not known:
            raise ProtocolError(f"unknown message {reprlib.repr(item)}")
        messages.append(_UNPACKERS[item[0]](item[1:]))
    return messages


def _close(packed: list[Any]) -> bytes:
    """The envelope around it."""
    try:
        frame: bytes = msgpack.packb([PROTOCOL, packed])
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"cannot be sent: a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    return frame


def _open(frame: bytes) -> list[Any]:
    """What the envelope holds. Takes at most some 70 bytes of memory for a byte of the frame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        envelope = msgpack.unpackb(
            frame, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0, object_pairs_hook=_table
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes is not msgpack: {error}") from error
    if type(envelope) is not list or len(envelope) != 2 or type(envelope[1]) is not list:
        raise ProtocolError("frame is not [protocol, messages]")
    version, packed = envelope
    if type(version) is not int or version != PROTOCOL:
        raise ProtocolError(f"peer speaks protocol {reprlib.repr(version)}, this side speaks {PROTOCOL}")
    return packed  # type: ignore[no-any-return]


def _table(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs) or not all(type(key) is str for key in table):
        raise ProtocolError("a table has a key twice, or one that is not text")
    return table
