"""Publish a checkpoint: write a folder in Hugging Face's form, with a model card, and upload it.

Owns the checks before any work, the files of the folder, and the check that they contain no key and no place of this
machine. `merging` makes the whole model.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from unstable_lite.adapters.frozen import ADAPTER, BEST, NEWEST, RUN, FrozenAdapter, find_saved, read_facts
from unstable_lite.adapters.peft_files import CONFIG as ADAPTER_CONFIG
from unstable_lite.adapters.peft_files import WEIGHTS, read_json
from unstable_lite.config import Config
from unstable_lite.config.env_ids import QUESTIONS
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.files import read_records, understood
from unstable_lite.games.templates import known_templates
from unstable_lite.models import BUILTIN
from unstable_lite.planning.plan import checked_config
from unstable_lite.planning.trust import CONFIG, run_config
from unstable_lite.planning.validation import base_problem, is_local
from unstable_lite.printable import as_markdown
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.run_directory import VERSIONS, to_toml
from unstable_lite.types import BASE, INITIAL

LOG_IN = (
    "log in with `hf auth login`, or set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)"
)
TAGS = ["unstable-lite", "reinforcement-learning", "text-games"]
FORMATS = (".md", ".json", ".toml", ".txt", ".jinja", ".py")
"""Ends of the names of text files."""
PRIVATE = {
    *("run.output_dir", "engine.urls", "engine.adapter_folder", "learner.rendezvous", "lora.initial_lora_path"),
    *("lora.initial_critic_path", "opponents.base_url", "tracker.wandb_project", "sft.data", "sft.output"),
}
"""Keys that name directories, servers or accounts of the author."""
OPEN = {"env_kwargs", "options"}
"""Last parts of the keys of open tables, in which a user may write anything. The options of a custom class, with its
name `module:Class`, are one, too."""
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS")
"""Parts of the names of environment variables whose values are never published."""
CREDENTIAL = re.compile(
    r"\bhf_[A-Za-z0-9]{10,}|\b[srp]k-[\w-]{10,}|\bgh[pousr]_\w{20,}|\b(?:github_pat_|glpat-|xox[a-z]-|AIza)[\w-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY|://[^\s/@\"']+@"
    r"|(?i:(?:key|token|secret|passw(?:or)?d|passphrase|pwd|credentials?|auth)\"?\s*=\s*\"[^\"\s]{6})"
)
"""Tokens of well-known services, private keys, URLs with a password, and values of keys with such a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A checkpoint that can be published."""

    run: Path
    repository: str
    adapter: FrozenAdapter
    config: Config
    base: str
    """Name of the base for others: a hub's, or a packaged model's."""
    is_base_on_hub: bool
    merges: bool
    license: str | None
    with_options: bool
    """Whether to publish tables in which a user may write anything, such as `env_kwargs`."""


def plan_publication(
    run: Path,
    repository: str,
    checkpoint: str = "last",
    *,
    base: str | None = None,
    merges: bool = False,
    license: str | None = None,
    trusts_config: bool = False,
    with_options: bool = False,
) -> Publication:
    """Return a checked publication. Raises ConfigError, or AdapterError if the checkpoint's files are not an adapter.

    checkpoint: its update, `best` or `last`. base: name of the base for others; default: the run's `model_name`.
    merges: publish the whole model.
    """
    _check_name(repository)
    adapter = _find_checkpoint(run, checkpoint)
    # Only the base's own code can run, and only if it is loaded here.
    config = checked_config(run_config(run, (), trusts_config) if merges else run / CONFIG)
    if problem := base_problem(adapter, config):
        raise ConfigError(problem)
    name = base or config.model_name
    if not merges and is_local(name):
        raise ConfigError(
            f"the base {name} is on this machine, and without it others cannot use the adapter: name its place on the "
            "hub with --base-model ORGANISATION/NAME, or publish the whole model with --merge"
        )
    return Publication(
        run=run.resolve(),
        repository=repository,
        adapter=adapter,
        config=config,
        base=Path(name).name if is_local(name) else name,
        is_base_on_hub=name not in BUILTIN and not is_local(name),
        merges=merges,
        license=license,
        with_options=with_options,
    )


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{error} Write the repository as USER/NAME") from None


def _find_checkpoint(run: Path, which: str) -> FrozenAdapter:
    word = {"last": NEWEST, NEWEST: NEWEST, BEST: BEST}.get(which, f"ckpt-{which.removeprefix('ckpt-')}")
    if word.startswith("ckpt-") and not word.removeprefix("ckpt-").isdecimal():
        raise ConfigError(f"--checkpoint {which}: give the number of an update, 'best' or 'last'")
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run directory: it does not exist")
    return read_facts(find_saved(f"{run.resolve()}/{word}"))


def upload(
    publication: Publication, is_private: bool, say: Callable[[str], None], may_publish: Callable[[], bool]
) -> str:
    """Write the folder, show the card, which contains the config, upload the folder, and return its address.

    Raises UnstableError if `may_publish` returns False, or if the hub cannot be used.
    """
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
        say((folder / "README.md").read_text(encoding="utf-8"))
        if not may_publish():
            raise UnstableError("nothing was uploaded")
        say(f"uploading {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB to {api.endpoint}")
        try:
            # None keeps the visibility of a repository that exists, and the default of the account for a new one.
            created = api.create_repo(publication.repository, private=is_private or None, exist_ok=True)
            message = f"{publication.adapter.path.name} of unstable-lite"
            api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message)
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
        deviation = _write_weights(publication, unfinished)
        left_out: list[str] = []
        table = publication.config.model_dump(mode="json", exclude_defaults=True)
        public = {"model_name": "", **_public("", table, left_out, publication)}
        shown = to_toml({**public, "model_name": publication.base})
        if left_out:
            names = " ".join(", ".join(dict.fromkeys(left_out)).split())
            shown = f"# Left out: {names}. push --with-options publishes them.\n{shown}"
        (unfinished / CONFIG).write_text(shown, encoding="utf-8")
        with understood(publication.run):
            (unfinished / "README.md").write_text(_card(publication, shown.strip(), deviation), encoding="utf-8")
        _check_privacy(publication, unfinished)
        unfinished.rename(directory)


def _write_weights(publication: Publication, directory: Path) -> float:
    """Write the adapter, or the merged model; return the largest change of a log-probability by rounding the latter."""
    adapter, config = publication.adapter, publication.config
    if publication.merges:
        merging = importlib.import_module("unstable_lite.sharing.merging")  # loads torch
        deviation: float = merging.write_merged(adapter.path, config.model_name, config.trust_remote_code, directory)
        return deviation
    shutil.copyfile(adapter.path / WEIGHTS, directory / WEIGHTS)
    stored = read_json(adapter.path / ADAPTER_CONFIG) | {"base_model_name_or_path": publication.base}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    return 0.0


def _public(key: str, value: Any, left_out: list[str], publication: Publication) -> Any:
    """Return a config's value without places on this machine. `left_out`: receives the names of open tables."""
    if isinstance(value, list):
        return [_public(key, item, left_out, publication) for item in value]
    if not isinstance(value, dict):
        return _without_directories(value) if isinstance(value, str) else value
    public: dict[str, Any] = {}
    for name, inner in value.items():
        inside, is_custom = f"{key}.{name}" if key else name, ":" in str(value.get("name", ""))
        is_open = name in OPEN or (is_custom and name != "name") or (":" in name and isinstance(inner, dict))
        if is_open and inner and not publication.with_options:
            left_out.append(inside)
            inner = {} if ":" in name else None
        if inside not in PRIVATE:
            public[_without_directories(name)] = _public(inside, inner, left_out, publication)
    return public


def _without_directories(text: str) -> str:
    """Return a value without the directories of a path in it: the last part of a local path, or two parts of a run's.

    The path may follow `adapter:`, `run:` or `questions:`.
    """
    for prefix in (ADAPTER, RUN, QUESTIONS):
        if text.startswith(prefix):
            parts = Path(text.removeprefix(prefix)).parts[-2 if prefix == RUN else -1 :]
            return prefix + "/".join(parts)
    return Path(text).name if text.startswith(("/", "~", "./", "../")) and "\n" not in text else text


def _card(publication: Publication, config_toml: str, deviation: float) -> str:
    """Return README.md: base, games, evaluations, usage, config. `deviation`: as of `_write_weights`."""
    from huggingface_hub import ModelCardData

    config, base, is_merged = publication.config, publication.base, publication.merges
    relation = {"base_model": base, "base_model_relation": "finetune" if is_merged else "adapter"}
    front_matter = ModelCardData(
        library_name="transformers" if is_merged else "peft",
        license=publication.license,
        pipeline_tag="text-generation",
        tags=TAGS + ["lora"] * (not is_merged),
        **(relation if publication.is_base_on_hub else {}),  # type: ignore[arg-type]
    )
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"shown": as_markdown, "quoted": shlex.quote}
    known, envs = known_templates(config.templates), config.train_envs
    templates = [known[name] for name in dict.fromkeys(env.prompt_template for env in envs)]
    backticks = re.findall("`+", f"{config_toml}{templates}")
    text = files("unstable_lite.sharing").joinpath("model_card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        front_matter=front_matter.to_yaml(),
        repository=publication.repository,
        name=publication.repository.rpartition("/")[2],
        checkpoint=publication.adapter.path.name,
        base=base,
        is_packaged=base in BUILTIN,
        rank=publication.adapter.rank,
        is_merged=is_merged,
        deviation=deviation,
        config=config,
        config_toml=config_toml,
        envs=[env.model_copy(update={"env_id": _without_directories(env.env_id)}) for env in envs],
        templates=templates,
        fence="`" * max(3, 1 + max(map(len, backticks), default=0)),
        evaluations=_evaluations(publication),
        versions=_versions(publication.run),
    )


def _evaluations(publication: Publication) -> list[Evaluation]:
    """Return the evaluations of the base and of the checkpoint, the newest of each env, opponent and kind."""
    found: dict[tuple[str, ...], Evaluation] = {}
    run, checkpoint = publication.run, publication.adapter.path.name
    for line in read_records(run / "eval.jsonl"):
        if line["model"] in (BASE, INITIAL, checkpoint):
            one = Evaluation.from_json(line)
            is_concurrent, is_of_checkpoint = one.label == "concurrent", one.model == checkpoint
            found[one.env_id, one.opponent, str(is_concurrent), str(is_of_checkpoint)] = replace(
                one,
                env_id=as_markdown(_without_directories(one.env_id)),
                opponent=as_markdown(_without_directories(one.opponent)),
            )
    return [found[key] for key in sorted(found) if found[key].n]


def _versions(run: Path) -> dict[str, str]:
    try:
        packages: dict[str, Any] = json.loads((run / VERSIONS).read_text(encoding="utf-8"))["packages"]
        return {str(name): str(version) for name, version in packages.items() if version is not None}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnstableError(f"{run / VERSIONS} cannot be read: {error}") from error


def _check_privacy(publication: Publication, directory: Path) -> None:
    """Raise UnstableError if a text file contains a key of the environment, or a place on this machine.

    The same for a credential in a file that is made of the config.
    """
    private = {str(publication.run.parent): "", str(Path.home()): ""}
    for name, value in os.environ.items():
        if any(word in name.upper() for word in SECRET_WORDS) and len(value) > 5:
            # A short one only as a whole value: it may be a word.
            escaped = json.dumps(value, ensure_ascii=False)
            private[escaped if len(value) < 8 else escaped[1:-1]] = f"a key of your environment ({name})"
    private.pop("/", None)
    for file in directory.iterdir():
        if file.suffix in FORMATS:
            text = file.read_text(encoding="utf-8", errors="replace")
            found = [what or secret for secret, what in private.items() if secret in text]
            if file.name in (CONFIG, "README.md", ADAPTER_CONFIG) and (token := CREDENTIAL.search(text)):
                found.append(f"a text like a credential (line {text.count(chr(10), 0, token.start()) + 1})")
            if found:
                raise UnstableError(f"{file.name} would publish {found[0]}; remove it from {publication.run / CONFIG}")
