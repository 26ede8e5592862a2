"""Publish a checkpoint: write a folder in Hugging Face's form, with a model card, and upload it.

Owns the checks before any work, the files of the folder, and the check that they contain no key and no place of this
machine. `merging` makes the whole model.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from unstable_lite.adapters.frozen import BEST, NEWEST, find_adapter, name_of
from unstable_lite.adapters.peft_files import CONFIG as ADAPTER_CONFIG
from unstable_lite.adapters.peft_files import WEIGHTS, read_json
from unstable_lite.config.env_ids import content_file
from unstable_lite.config.games import parse_player
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
from unstable_lite.types import BASE, INITIAL, uid_of

LOG_IN = (
    "log in with `hf auth login`, or set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)"
)
FOLDER_ONLY = "Or write the folder only: --dry-run DIR"
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
CHOSEN = re.compile(rf"{NEWEST}|{BEST}|linear|ckpt-[\d,]+")
"""Last parts of a player's path that choose among a run's checkpoints."""
CREDENTIAL = re.compile(
    r"\bhf_[A-Za-z0-9]{10,}|\b[srp]k-[\w-]{10,}|\bgh[pousr]_\w{20,}|\b(?:github_pat_|glpat-|xox[a-z]-|AIza)[\w-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY|://[^\s/@\"']+@"
    r"|(?i:(?:key|token|secret|passw(?:or)?d|passphrase|pwd|credentials?|auth)\"?\s*=\s*\"[^\"\s]{6})"
)
"""Tokens of well-known services, private keys, URLs with a password, and values of keys with such a name."""


class Publication:
    """A checkpoint that can be published."""

    def __init__(
        self,
        run: Path,
        repository: str,
        checkpoint: str = "last",
        *,
        base: str | None = None,
        merges: bool = False,
        license: str | None = None,
        trusts_config: bool = False,
        with_options: bool = False,
    ) -> None:
        """Check everything before any work.

        checkpoint: its update, `best` or `last`. base: name of the base for others; default: the run's `model_name`.
        merges: publish the whole model. with_options: publish tables in which a user may write anything, too. Raises
        ConfigError, or AdapterError if the checkpoint's files are not an adapter.
        """
        try:
            validate_repo_id(repository)
        except HFValidationError as error:
            raise ConfigError(f"{error} Write the repository as USER/NAME") from None
        self.run, self.repository, self.license = run.resolve(), repository, license
        self.merges, self._with_options = merges, with_options
        which = f"ckpt-{checkpoint}" if checkpoint.isdecimal() else NEWEST if checkpoint == "last" else checkpoint
        if not re.fullmatch(rf"ckpt-\d+|{NEWEST}|best", which):
            raise ConfigError(f"--checkpoint {checkpoint}: give the number of an update, 'best' or 'last'")
        self.adapter = find_adapter(f"run:{self.run}/{which}")
        self.checkpoint = name_of(self.adapter.path)
        # Only the base's own code can run, and only if it is loaded here.
        self.config = checked_config(run_config(run, (), trusts_config) if merges else run / CONFIG)
        if problem := base_problem(self.adapter, self.config):
            raise ConfigError(problem)
        name = base or self.config.model_name
        if not merges and is_local(name):
            raise ConfigError(
                f"the base {name} is on this machine, and without it others cannot use the adapter: name its place on "
                "the hub with --base-model ORGANISATION/NAME, or publish the whole model with --merge"
            )
        self.is_base_on_hub = name not in BUILTIN and not is_local(name)
        self.base = Path(name).name if is_local(name) else name
        """Name of the base for others: a hub's, or a packaged model's."""

    def upload(self, is_private: bool, say: Callable[[str], None], may_publish: Callable[[], bool]) -> str:
        """Write the folder, show the card, which contains the config, upload the folder, and return its address.

        Raises UnstableError if `may_publish` returns False, or if the hub cannot be used.
        """
        api = HfApi(library_name="unstable-lite")
        if get_token() is None:
            raise ConfigError(f"there is no token for {api.endpoint}: {LOG_IN}. {FOLDER_ONLY}")
        # Of httpx or its replacement, as is the base of all errors of connections.
        errors: tuple[type[Exception], ...] = (OSError, ValueError, HfHubHTTPError.__mro__[1])
        with tempfile.TemporaryDirectory(prefix="unstable-lite-push-") as place:
            folder = Path(place) / "folder"
            self.write(folder)
            say((folder / "README.md").read_text(encoding="utf-8"))
            if not may_publish():
                raise UnstableError("nothing was uploaded")
            say(f"uploading {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB to {api.endpoint}")
            try:
                # None keeps the visibility of a repository that exists, and the default of the account for a new one.
                created = api.create_repo(self.repository, private=is_private or None, exist_ok=True)
                message = f"{self.checkpoint} of unstable-lite"
                api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message)
            except errors as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                event = "cannot be reached" if status is None else f"refuses {self.repository} ({status})"
                advice = f"name your own user, or {LOG_IN}" if status in (401, 403) else f"try again. {FOLDER_ONLY}"
                reason = str(error).strip().partition("\n")[0][:300]
                raise UnstableError(f"{api.endpoint} {event}: {reason}; {advice}") from error
        return str(created)

    def write(self, directory: Path) -> None:
        """Write the files to publish into a new directory, which exists afterwards only if it is whole.

        Raises ConfigError if it exists, ModelError if the adapter cannot be merged, UnstableError for a damaged run.
        """
        if directory.exists():
            raise ConfigError(f"{directory} exists; name a new folder, or remove it")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=directory.parent) as place:
            (unfinished := Path(place) / "folder").mkdir()
            rounding = self._write_weights(unfinished)
            shown = self._shown_config()
            (unfinished / CONFIG).write_text(shown, encoding="utf-8")
            with understood(self.run):
                (unfinished / "README.md").write_text(self._card(shown.strip(), rounding), encoding="utf-8")
            _check_privacy(self.run, unfinished)
            unfinished.rename(directory)

    def _write_weights(self, directory: Path) -> float:
        """Write the adapter or the merged model; return the largest change of a log-probability by rounding."""
        if self.merges:
            from unstable_lite.sharing.merging import write_merged  # loads torch

            return write_merged(self.adapter, self.config.model_name, self.config.trust_remote_code, directory)
        shutil.copyfile(self.adapter.path / WEIGHTS, directory / WEIGHTS)
        stored = read_json(self.adapter.path / ADAPTER_CONFIG) | {"base_model_name_or_path": self.base}
        (directory / ADAPTER_CONFIG).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
        return 0.0

    def _shown_config(self) -> str:
        """Return the config as TOML, after a comment that names the tables that were left out."""
        left_out: list[str] = []
        table = self.config.model_dump(mode="json", exclude_defaults=True)
        public = {"model_name": "", **_public("", table, None if self._with_options else left_out)}
        shown = to_toml({**public, "model_name": self.base})
        names = " ".join(", ".join(dict.fromkeys(left_out)).split())
        return f"# Left out: {names}. push --with-options publishes them.\n{shown}" if left_out else shown

    def _card(self, config_toml: str, rounding: float) -> str:
        """Return README.md: base, games, evaluations, usage, config. `rounding`: as of `_write_weights`."""
        environment = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
        )
        environment.filters |= {"shown": as_markdown, "quoted": shlex.quote, "public": _without_directories}
        known = known_templates(self.config.templates)
        templates = [known[name] for name in dict.fromkeys(env.prompt_template for env in self.config.train_envs)]
        backticks = re.findall("`+", f"{config_toml}{templates}")
        text = files("unstable_lite.sharing").joinpath("model_card.md.jinja").read_text(encoding="utf-8")
        return environment.from_string(text).render(
            publication=self,
            front_matter=self._front_matter(),
            is_packaged=self.base in BUILTIN,
            rounding=rounding,
            config_toml=config_toml,
            templates=templates,
            fence="`" * max(3, 1 + max(map(len, backticks), default=0)),
            evaluations=self._evaluations(),
            packages=dict(json.loads((self.run / VERSIONS).read_text(encoding="utf-8"))["packages"]),
        )

    def _front_matter(self) -> str:
        relation = {"base_model": self.base, "base_model_relation": "finetune" if self.merges else "adapter"}
        return ModelCardData(
            library_name="transformers" if self.merges else "peft",
            license=self.license,
            pipeline_tag="text-generation",
            tags=["unstable-lite", "reinforcement-learning", "text-games", *["lora"] * (not self.merges)],
            **(relation if self.is_base_on_hub else {}),  # type: ignore[arg-type]
        ).to_yaml()

    def _evaluations(self) -> list[Evaluation]:
        """Return the evaluations of the base and of the checkpoint, the newest of each env, opponent and kind."""
        found, checkpoint = dict[tuple[str, str, bool, bool], Evaluation](), self.checkpoint
        saved, _, policy = checkpoint.partition("/")
        for one in map(Evaluation.from_json, read_records(self.run / "eval.jsonl")):
            if policy and (one.policy, f"ckpt-{one.step}") == (policy, saved) and one.label != "concurrent":
                one = replace(one, model=checkpoint)  # instead of the number of the policy's own updates
            if one.n and one.model in (BASE, uid_of(policy, INITIAL), checkpoint):
                key = one.env_id, one.opponent, one.label == "concurrent", one.model == checkpoint
                env_id, opponent = (as_markdown(_without_directories(name)) for name in key[:2])
                found[key] = replace(one, env_id=env_id, opponent=opponent)
        return [found[key] for key in sorted(found)]


def _public(key: str, value: Any, left_out: list[str] | None) -> Any:
    """Return a config's value without places on this machine.

    left_out: list that receives the names of open tables; None: publish them.
    """
    if isinstance(value, list):
        return [_public(key, item, left_out) for item in value]
    if not isinstance(value, dict):
        return _without_directories(value) if isinstance(value, str) else value
    public: dict[str, Any] = {}
    for name, inner in value.items():
        inside, is_custom = f"{key}.{name}" if key else name, ":" in str(value.get("name", ""))
        is_open = name in OPEN or (is_custom and name != "name") or (":" in name and isinstance(inner, dict))
        if is_open and inner and left_out is not None:
            left_out.append(inside)
            inner = {} if ":" in name else None
        if inside not in PRIVATE:
            public[_without_directories(name)] = _public(inside, inner, left_out)
    return public


def _without_directories(text: str) -> str:
    """Return a value without the directories of a path in it: a run's name and the choice among its checkpoints stay.

    The path may follow `adapter:`, `run:`, `average:` or `questions:`.
    """
    word, _, path = text.partition(":")
    if parse_player(text).has_adapter or content_file(text):
        parts = Path(path).parts
        chosen = [place for place, part in enumerate(parts[:-4:-1], start=1) if CHOSEN.fullmatch(part)]
        of_run = max(chosen, default=0) if word in ("run", "average") else 0
        return f"{word}:{'/'.join(parts[-1 - of_run :])}"
    return Path(text).name if text.startswith(("/", "~", "./", "../")) and "\n" not in text else text


def _check_privacy(run: Path, directory: Path) -> None:
    """Raise UnstableError if a file other than weights contains a key of the environment, or a place on this machine.

    The same for a credential in a file that is made of the config.
    """
    private = {str(run.parent): "", str(Path.home()): ""}
    for name, value in os.environ.items():
        if any(word in name.upper() for word in SECRET_WORDS) and len(value) > 5:
            # A short one only as a whole value: it may be a word.
            escaped = json.dumps(value, ensure_ascii=False)
            private[escaped if len(value) < 8 else escaped[1:-1]] = f"a key of your environment ({name})"
    private.pop("/", None)
    for file in (file for file in directory.iterdir() if file.suffix != ".safetensors"):
        text = file.read_text(encoding="utf-8", errors="replace")
        found = [event or secret for secret, event in private.items() if secret in text]
        if file.name in (CONFIG, "README.md", ADAPTER_CONFIG) and (token := CREDENTIAL.search(text)):
            found.append(f"a text like a credential (line {text.count(chr(10), 0, token.start()) + 1})")
        if found:
            raise UnstableError(f"{file.name} would publish {found[0]}; remove it from {run / CONFIG}")
