"""Check that this user wrote a run's config.toml; if not, find the code and the servers that it names.

A config may name Python to run and servers to send keys to. In a user's own config this is intended; in a run directory
from another person it is a trap. So every config.toml that a run writes is sealed with a secret of this user and
machine. Owner and times of a file prove nothing, because an unpacked archive belongs to the user who unpacked it.
Knows nothing else of a config's meaning. Also warns of keys that travel without encryption.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_built_in
from unstable_lite.config.games import is_policy, parse_player
from unstable_lite.config.reading import parse_toml
from unstable_lite.errors import ConfigError
from unstable_lite.files import AppendFile, check_links
from unstable_lite.games.api_keys import SERVER_KEY, endpoint_url, is_in_clear, is_loopback, key_variable, url_problem
from unstable_lite.league.opponents import training_opponents
from unstable_lite.models import BUILTIN

CONFIG, SEAL = "config.toml", "config.seal"
SECRET_BYTES = 32
_URL_KEYS = ("opponents.base_url", "engine.urls")
_TEXT_KEYS = ("templates", "engine.replies")


def seal_config(directory: Path, content: bytes) -> None:
    """Record in the run directory that `content` is a config.toml of this user. Raises OSError if this is impossible.

    The seals of earlier versions stay, so that a crash between seal and config does no harm. If the home directory is
    not writable, no seal is written, and `run_config` later treats the config as another person's.
    """
    secret = _secret(is_made=True)
    if secret is not None and not _is_sealed(directory, content):
        with contextlib.closing(AppendFile(directory / SEAL)) as file:
            file.write(f"{_digest(secret, content)}\n".encode())


def run_config(directory: Path, overrides: Sequence[str] = (), is_trusted: bool = False) -> Path:
    """Return the path of a run's config.toml, to be read with `overrides`.

    Raises ConfigError if this user did not write it on this machine, `is_trusted` is false, and it names code to run or
    a server that a key would be sent to. Keys that the overrides set do not count. Raises it for links as well.
    """
    check_links(directory)
    path = directory / CONFIG
    try:
        content = path.read_bytes()
    except OSError:
        return path  # reading the config reports the error
    if is_trusted or _is_sealed(directory, content):
        return path
    overridden = {override.partition("=")[0].strip() for override in overrides}
    found = dict.fromkeys(
        f"{key} = {value!r}{reason}"
        for key, value, reason in _risks(parse_toml(content, str(path)))
        if not any(key == name or key.startswith(f"{name}.") for name in overridden)
    )
    if found:
        raise ConfigError(
            f"{path} was not written by you on this machine, and would run code or use your keys: {'; '.join(found)}. "
            "If you trust these modules and servers, add --trust-config; otherwise set these settings as overrides"
        )
    return path


def _risks(content: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (key with its sections, value, remark) for each entry that is not plain data, unknown keys included."""
    for key, value in _entries("", content):
        last, is_text = key.rpartition(".")[2], isinstance(value, str)
        # A policy has keys of the run's sections, some under other names.
        is_data = _IS_DATA.get(re.sub(r"^policies\.\w+\.", "", key)) or _IS_DATA.get(last)
        if is_text and key in _URL_KEYS:
            if variable := _key_sent_to(value):
                yield key, value, f" ({variable} is sent there)"
        elif last == "trust_remote_code" or (is_text and key.startswith("engine.options.")):
            if value:
                yield key, value, ""
        elif is_text and ":" in value and not (is_data and is_data(value)):
            yield key, value, ""


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each value, with the items of lists and, for plugins with options, a table's names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            inside = f"{key}.{name}" if key else name
            if inside not in _TEXT_KEYS:
                if ":" in name:
                    yield key, name
                yield from _entries(inside, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(key, inner)
    else:
        yield key, value


_IS_DATA: dict[str, Callable[[str], bool]] = {
    "model_name": BUILTIN.__contains__,
    "learner.kl_reference": lambda value: value.startswith("stage:"),
    **dict.fromkeys(("opponents", "league.opponent_sampling_strategy"), is_policy),
    **dict.fromkeys(("env_id", "weights"), is_built_in),
    **dict.fromkeys(
        ("fixed_opponent", "fixed_opponents", "sft.players", "sft.imitate"),
        lambda name: parse_player(name).kind != "class",
    ),
}
"""Tests of values with a colon, by the key or its last part: one that passes is data, every other one names code."""


def _key_sent_to(url: str) -> str | None:
    """Return the environment variable whose key could be sent to a server on another host; None if there is none."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    own = key_variable(url) if host is not None else ""
    is_openrouter = own == "OPENROUTER_API_KEY" and url_problem(url) is None and not is_in_clear(url)
    if host is not None and (is_loopback(url) or is_openrouter):
        return None
    return next((name for name in (own, SERVER_KEY) if os.environ.get(name)), None)


def clear_key_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each server on another machine that is sent a key without encryption."""
    fixed = {env.fixed_opponent for env in config.eval_envs}.union(*training_opponents(config).values())
    url, engine = endpoint_url(config.opponents.base_url), config.engine
    is_asked = any(parse_player(name).kind == "remote" for name in fixed)
    sent = [("opponents.base_url", url, key_variable(url))] * is_asked
    sent += [("engine.urls", url, SERVER_KEY) for url in engine.urls]
    for key, url, variable in sent:
        if os.environ.get(variable) and is_in_clear(url):
            yield f"{key} = {url}: the key in {variable} is sent there without encryption; use https if possible"


def _is_sealed(directory: Path, content: bytes) -> bool:
    secret = _secret(is_made=False)
    if secret is None:
        return False
    try:
        seals = (directory / SEAL).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False
    digest = _digest(secret, content)
    return any(hmac.compare_digest(digest, seal) for seal in seals)


def _digest(secret: bytes, content: bytes) -> str:
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def _secret(is_made: bool) -> bytes | None:
    """Return the user's secret, made if absent and `is_made`; None if it cannot be read or made."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "unstable_lite"
        path = state / "secret"
        if is_made and not path.exists():
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = state / f".{secrets.token_hex(8)}"
            fresh.touch(mode=0o600, exist_ok=False)
            try:
                fresh.write_bytes(secrets.token_bytes(SECRET_BYTES))
                with contextlib.suppress(FileExistsError):  # another process was first
                    path.hardlink_to(fresh)
            finally:
                fresh.unlink()
        secret = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    return secret if len(secret) == SECRET_BYTES else None
