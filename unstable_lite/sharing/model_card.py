"""The model card of a published checkpoint: base, games, evaluations, usage, config.

Fills in model_card.md.jinja. Knows nothing of files and uploads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import jinja2

from unstable_lite.config import Config
from unstable_lite.games.templates import known_templates
from unstable_lite.models import BUILTIN
from unstable_lite.sharing.public_config import without_directories
from unstable_lite.tracking.evaluations import Evaluation

TAGS = ["unstable-lite", "reinforcement-learning", "text-games"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    repository: str
    checkpoint: str
    """Name such as `ckpt-20`."""
    base: str
    """Name of the base for others: a hub's, or a packaged model's."""
    is_base_on_hub: bool
    rank: int
    is_merged: bool
    deviation: float
    """Largest change of a log-probability by rounding the merged weights; 0 for an adapter."""
    license: str | None
    config: Config
    config_toml: str
    """Keys of the config to publish."""
    evaluations: Sequence[Evaluation]
    """Evaluations of the base and of the checkpoint."""
    versions: Mapping[str, str]

    def text(self) -> str:
        """Return README.md."""
        text = files("unstable_lite.sharing").joinpath("model_card.md.jinja").read_text(encoding="utf-8")
        environment = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
        )
        known, envs = known_templates(self.config.templates), self.config.train_envs
        return environment.from_string(text).render(
            {name: getattr(self, name) for name in self.__dataclass_fields__}
            | {
                "front_matter": self._front_matter(),
                "name": self.repository.rpartition("/")[2],
                "is_packaged": self.base in BUILTIN,
                "envs": [env.model_copy(update={"env_id": without_directories(env.env_id)}) for env in envs],
                "templates": [known[name] for name in dict.fromkeys(env.prompt_template for env in envs)],
                "evaluations": [
                    replace(one, env_id=without_directories(one.env_id), opponent=without_directories(one.opponent))
                    for one in self.evaluations
                    if one.n
                ],
            }
        )

    def _front_matter(self) -> str:
        # Imported here because its library takes a second to import, and other commands do not need it.
        from huggingface_hub import ModelCardData

        relation = {"base_model_relation": "finetune" if self.is_merged else "adapter"}
        more: dict[str, Any] = {"base_model": self.base, **relation} if self.is_base_on_hub else {}
        return ModelCardData(
            library_name="transformers" if self.is_merged else "peft",
            license=self.license,
            pipeline_tag="text-generation",
            tags=TAGS + ["lora"] * (not self.is_merged),
            **more,
        ).to_yaml()
