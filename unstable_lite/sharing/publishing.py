"""Publish a checkpoint: write a folder in Hugging Face's form, and upload it.

Owns the checks before any work, the files of the folder, and the check that they contain no key and no place of this
machine.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.adapters.peft_files import CONFIG as ADAPTER_CONFIG
from unstable_lite.adapters.peft_files import WEIGHTS, read_json
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.evaluation.models import EvaluatedModel, check_base
from unstable_lite.files import read_records, understood
from unstable_lite.models import BUILTIN
from unstable_lite.planning.frozen_players import is_local
from unstable_lite.planning.plan import checked_config
from unstable_lite.planning.trust import CONFIG, run_config
from unstable_lite.sharing.checkpoints import LAST, find_checkpoint
from unstable_lite.sharing.model_card import Card
from unstable_lite.sharing.public_config import public_config
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.run_directory import VERSIONS, to_toml
from unstable_lite.types import BASE, INITIAL

LOG_IN = (
    "log in with `hf auth login`, or set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)"
)
FORMATS = (".md", ".json", ".toml", ".txt", ".jinja", ".py")
"""Ends of the names of text files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A checkpoint that can be published."""

    run: Path
    repository: str
    model: EvaluatedModel
    config: Config
    base: str
    """Name of the base for others."""
    is_base_on_hub: bool
    merges: bool
    license: str | None


def plan_publication(
    run: Path,
    repository: str,
    checkpoint: str = LAST,
    *,
    base: str | None = None,
    merges: bool = False,
    license: str | None = None,
    trusts_config: bool = False,
) -> Publication:
    """Return a checked publication. Raises ConfigError.

    base: name of the base for others; default: the run's `model_name`. merges: publish the whole model.
    """
    _check_name(repository)
    model = find_checkpoint(run, checkpoint)
    # Only the base's own code can run, and only if it is loaded here.
    path = run_config(run, (), trusts_config) if merges else run / CONFIG
    config = checked_config(path)
    check_base([model], config)
    name = base or config.model_name
    if not merges and is_local(name):
        raise ConfigError(
            f"the base {name} is on this machine, and without it others cannot use the adapter: name its place on the "
            "hub with --base-model ORGANISATION/NAME, or publish the whole model with --merge"
        )
    return Publication(
        run=run.resolve(),
        repository=repository,
        model=model,
        config=config,
        base=Path(name).name if is_local(name) else name,
        is_base_on_hub=name not in BUILTIN and not is_local(name),
        merges=merges,
        license=license,
    )


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{error} Write the repository as USER/NAME") from None


def write_folder(publication: Publication, directory: Path) -> None:
    """Write the files to publish into a new directory, which exists afterwards only if it is whole.

    Raises ConfigError if it exists, ModelError if the adapter cannot be merged, UnstableError for a damaged run.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists; name a new folder, or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=directory.parent) as place:
        unfinished = Path(place) / "folder"
        unfinished.mkdir()
        _fill(publication, unfinished)
        _check_privacy(publication, unfinished)
        unfinished.rename(directory)


def upload(publication: Publication, is_private: bool, say: Callable[[str], None]) -> str:
    """Write the folder, upload it, and return its address. Raises UnstableError if the hub cannot be used."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise ConfigError(
            f"there is no token for {HfApi().endpoint}: {LOG_IN}. Or write the folder only: --dry-run DIR"
        )
    # Of httpx or its replacement, as is the base of all errors of connections.
    errors: tuple[type[Exception], ...] = (OSError, ValueError, HfHubHTTPError.__mro__[1])
    api = HfApi(library_name="unstable-lite")
    with tempfile.TemporaryDirectory(prefix="unstable-lite-push-") as place:
        folder = Path(place) / "folder"
        write_folder(publication, folder)
        say(f"uploading {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB to {api.endpoint}")
        try:
            # None keeps the visibility of a repository that exists, and the default of the account for a new one.
            created = api.create_repo(publication.repository, private=is_private or None, exist_ok=True)
            api.upload_folder(
                repo_id=created.repo_id,
                folder_path=folder,
                commit_message=f"{publication.model.name} of unstable-lite",
            )
        except errors as error:
            raise UnstableError(_explain(error, publication.repository, api.endpoint)) from error
    return str(created)


def _explain(error: Exception, repository: str, endpoint: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = str(error).strip().partition("\n")[0][:300]
    if status in (401, 403):
        return f"{endpoint} does not let you write {repository} ({status}: {reason}): name your own user, or {LOG_IN}"
    if status is not None:
        return f"{endpoint} refused {repository} ({status}): {reason}"
    return f"{endpoint} cannot be reached ({reason}); try again, or write the folder only: --dry-run DIR"


def _fill(publication: Publication, directory: Path) -> None:
    adapter, config, deviation = publication.model.adapter, publication.config, 0.0
    assert adapter is not None
    if publication.merges:
        # torch takes seconds to import.
        merging = importlib.import_module("unstable_lite.sharing.merging")
        deviation = merging.write_merged(adapter.path, config.model_name, config.trust_remote_code, directory)
    else:
        shutil.copyfile(adapter.path / WEIGHTS, directory / WEIGHTS)
        stored = read_json(adapter.path / ADAPTER_CONFIG) | {"base_model_name_or_path": publication.base}
        (directory / ADAPTER_CONFIG).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    shown = to_toml(public_config(config, publication.base))
    card = Card(
        repository=publication.repository,
        checkpoint=adapter.path.name,
        base=publication.base,
        is_base_on_hub=publication.is_base_on_hub,
        rank=adapter.rank,
        is_merged=publication.merges,
        deviation=deviation,
        license=publication.license,
        config=config,
        config_toml=shown.strip(),
        evaluations=list(_evaluations(publication.run, adapter.path.name)),
        versions=_versions(publication.run),
    )
    (directory / CONFIG).write_text(shown, encoding="utf-8")
    (directory / "README.md").write_text(card.text(), encoding="utf-8")


def _evaluations(run: Path, checkpoint: str) -> Iterator[Evaluation]:
    """Yield the evaluations of the base and of the checkpoint, the newest of each env, opponent and kind."""
    found: dict[tuple[str, ...], Evaluation] = {}
    with understood(run):
        for line in read_records(run / "eval.jsonl"):
            if line["model"] in (BASE, INITIAL, checkpoint):
                one = Evaluation.from_json(line)
                is_concurrent = str(one.label == "concurrent")
                found[one.env_id, one.opponent, is_concurrent, str(one.model == checkpoint)] = one
    yield from (found[key] for key in sorted(found))


def _versions(run: Path) -> dict[str, str]:
    try:
        packages: dict[str, Any] = json.loads((run / VERSIONS).read_text(encoding="utf-8"))["packages"]
        return {str(name): str(version) for name, version in packages.items() if version is not None}
    except (OSError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UnstableError(f"{run / VERSIONS} cannot be read: {error}") from error


def _check_privacy(publication: Publication, directory: Path) -> None:
    """Raise UnstableError if a text file contains a key of the environment, or a place on this machine."""
    keys = [value for name, value in os.environ.items() if name.endswith(("_KEY", "_TOKEN")) and len(value) > 7]
    private = {str(publication.run.parent), str(Path.home()), *keys} - {"/"}
    for file in directory.iterdir():
        if file.suffix in FORMATS:
            text = file.read_text(encoding="utf-8", errors="replace")
            for secret in private:
                if secret in text:
                    what = "a key of your environment" if secret in keys else secret
                    raise UnstableError(f"{file.name} would publish {what}; remove it from {publication.run / CONFIG}")
