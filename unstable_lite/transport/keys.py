"""CURVE keys (RFC 26/ZMTP-CURVE) for workers on other machines: made, and read.

A directory of keys: `run.key_secret` stays where the run is; `run.key` and a worker's own `NAME.key_secret` go to the
worker's machine; the run admits whoever holds the secret of a public key in `admitted/`. Files are those of zmq.auth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from unstable_lite.errors import ConfigError

RUN, ADMITTED, WORKER = "run", "admitted", "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    public: bytes
    secret: bytes
    admitted: Path
    """A directory with the public keys of the workers that may connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    public: bytes
    secret: bytes
    run_public: bytes


def make_keys(directory: Path, workers: Sequence[str] = (WORKER,)) -> list[Path]:
    """Keys for the run, unless they are there, and for each of `workers`; returns the files that were written.

    Raises ConfigError for a name that is taken or that is not a plain file name.
    """
    admitted = directory / ADMITTED
    for name in workers:
        if name == RUN or Path(name).name != name:
            raise ConfigError(f"{name!r} cannot be the name of a worker's key; use letters and digits")
        if (directory / f"{name}.key_secret").exists() or (admitted / f"{name}.key").exists():
            raise ConfigError(f"{directory}: there is a key {name!r} already; choose another name, or remove it")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    admitted.mkdir(exist_ok=True)
    written: list[Path] = []
    if not (directory / f"{RUN}.key_secret").exists():
        written += _make(directory, RUN)
    for name in workers:
        public, secret = _make(directory, name)
        written += [public.rename(admitted / public.name), secret]
    return written


def read_run_keys(directory: Path) -> RunKeys:
    """Raises ConfigError for what is missing or is no key."""
    public, secret = _read(directory / f"{RUN}.key_secret")
    admitted = directory / ADMITTED
    if not any(admitted.glob("*.key")):
        raise ConfigError(f"{admitted}: no worker's public key; `unstable-lite keys {directory} NAME` makes one")
    for path in admitted.glob("*.key"):
        _read(path)
    return RunKeys(public=public, secret=_needed(secret, directory / f"{RUN}.key_secret"), admitted=admitted)


def read_worker_keys(directory: Path, name: str = WORKER) -> WorkerKeys:
    """Raises ConfigError for what is missing or is no key."""
    public, secret = _read(directory / f"{name}.key_secret")
    run_public, _ = _read(directory / f"{RUN}.key")
    return WorkerKeys(public=public, secret=_needed(secret, directory / f"{name}.key_secret"), run_public=run_public)


def _make(directory: Path, name: str) -> tuple[Path, Path]:
    secret = directory / f"{name}.key_secret"
    secret.touch(mode=0o600)
    public, _ = zmq.auth.create_certificates(directory, name)
    return Path(public), secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None and len(key) != 40:
                raise ValueError(f"a key of {len(key)} characters, not of 40")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: {reason}; `unstable-lite keys {path.parent}` makes keys") from error
    return public, secret


def _needed(secret: bytes | None, path: Path) -> bytes:
    if secret is None:
        raise ConfigError(f"{path}: it holds no secret key")
    return secret
