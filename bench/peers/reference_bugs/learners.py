"""Bugs of the reference as subclasses of the A2C learner: they change the tokens, the precision or the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch.optim import Optimizer

from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.games.templates import Template, known_templates
from unstable_lite.learner.algorithms.reinforce import A2CLearner
from unstable_lite.learner.model import Policy
from unstable_lite.learner.training_stats import Trained
from unstable_lite.models import resolve_model
from unstable_lite.types import TokenIds, TrainItem

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the observation in a prompt whose other parts are wanted."""


class WrongPrompt(A2CLearner):
    """Train the policy on answers to the bare observation, without the template in which the model was shown it.

    Reference: collector.py samples after `self._fmt(obs)` and stores `obs`; `_prepare_batch` in
    learners/a2c_learner.py trains on `obs + act`. It has no importance weights; with them most tokens would count
    little, because an answer is unlikely after another prompt.

    Effect on the data: each answer and its advantage are paired with a prompt after which it was never sampled, and
    which no game shows. The played policy changes only by what an adapter shares between the two prompts.
    """

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        templates, self._around = known_templates(config.templates), dict[str, tuple[str, str]]()
        for env in config.train_envs:
            template = templates[env.prompt_template]
            if not isinstance(template, Template):
                raise ConfigError(
                    f"{type(self).__name__}: the tokenizer lays out prompt_template {env.prompt_template!r} of "
                    f"{env.env_id}; use a template with its own markup"
                )
            before, _, after = template.prompt(_MARK, env.num_players).partition(_MARK)
            self._around[env.env_id] = before, after
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            resolve_model(config.model_name), trust_remote_code=config.trust_remote_code
        )

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        bare = [replace(item, prompt_ids=self._bare(item)) for item in items]
        return super().add_gradient(with_weight_one(self.policy, bare))

    def _bare(self, item: TrainItem) -> TokenIds:
        """Return the ids of the observation in the item's prompt."""
        assert item.context is not None
        before, after = self._around[item.context.env_id]
        text = self._tokenizer.decode(item.prompt_ids, clean_up_tokenization_spaces=False)
        assert text.startswith(before) and text.endswith(after), text
        return np.array(self._tokenizer(text[len(before) : len(text) - len(after)])["input_ids"], np.int32)


class Bfloat16Adapter(A2CLearner):
    """Keep the policy's adapter and its two moments in bfloat16, and let AdamW compute in it.

    Reference: `self.policy_model.to(torch.bfloat16)` in learners/base.py, before AdamW gets the parameters. (There
    gradients add up in bfloat16 too; here they do in float32 and are rounded once.)

    Effect on the data: none; the updates are rounded. A weight has 8 significant bits, so a step of less than 1/512 of
    it is lost, and multiplication by β₂ = 0.999 leaves the second moment unchanged, so it grows and never decays.
    """

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        optimizer = self.training.optimizer
        self._cast(torch.bfloat16)
        self._cast(torch.float32)
        optimizer.register_step_pre_hook(lambda *_: self._cast(torch.bfloat16))
        optimizer.register_step_post_hook(lambda *_: self._cast(torch.float32))

    @torch.no_grad()
    def _cast(self, dtype: torch.dtype) -> None:
        """Convert parameters, gradients and moments. Between two steps they are float32, with bfloat16's values."""
        optimizer: Optimizer = self.training.optimizer
        for parameter in self.policy.parameters.values():
            gradient, parameter.grad = parameter.grad, None  # torch refuses a gradient of another type
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
            moments = optimizer.state.get(parameter, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    moments[name] = moments[name].to(dtype)


class UncorrectedSampling(A2CLearner):
    """Train on log-probabilities at temperature 1 without importance weights, however the answers were sampled.

    An arm with it also samples as the reference does: temperature 0.6 and top_p 0.95.

    Reference: `temperature` 0.6 and the hidden `top_p` 0.95 of `SamplingParams` in actor.py; `log_softmax` of the plain
    logits in learners/a2c_learner.py; no step knows the probability with which it was sampled, nor which adapter did.

    Effect on the data: the answers come from a sharper policy than the one whose gradient is taken, without its least
    likely tokens, and stale ones count as if the newest policy had sampled them.
    """

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        head = self.policy._head
        own, head._temperature = head._temperature, 1.0
        try:
            return super().add_gradient(with_weight_one(self.policy, items))
        finally:
            head._temperature = own


def with_weight_one(policy: Policy, items: Sequence[TrainItem]) -> list[TrainItem]:
    """Return the items as if `policy` had sampled them just now, so that their importance weights are 1."""
    logp = policy.item_logprobs(items)
    return [replace(item, logprobs=logp_C.numpy()) for item, logp_C in zip(items, logp, strict=True)]
