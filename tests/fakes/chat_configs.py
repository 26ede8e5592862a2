"""Configs with a prompt template, and chat templates of made-up tokenizers."""

from typing import Any

from unstable_lite.config import Config
from unstable_lite.config.reading import parse_config
from unstable_lite.games.templates import Template, chats_in_use, own_tags, templates_for
from unstable_lite.models.tokenization import Tokenizer

TURNS = ["<|im_start|>", "<|im_end|>"]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chat_config(template: str = "mine", mine: dict[str, Any] | None = None, **sections: Any) -> Config:
    """Return a config whose env is asked by this template; `mine` are the keys of the template of that name."""
    env = {"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": template}
    own = {} if mine is None else {"templates": {"mine": {"user": "{observation}"} | mine}}
    config, problems = parse_config({"train_envs": [env], **own, **sections})
    assert config is not None, problems
    return config


def template_of(tokenizer: Tokenizer, config: Config) -> Template:
    """Return the template of the config's env, as this tokenizer lays it out."""
    prompts = tokenizer.prompts(chats_in_use(config), own_tags(config))
    return templates_for(config, prompts)[config.train_envs[0].prompt_template]
