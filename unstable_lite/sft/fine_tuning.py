"""Supervised fine-tuning of the adapter: completion tokens after their prompts, stop token included.

Owns tokenisation of pairs, the split, the optimiser and the one loop on this page. Tokenises with the engines'
code. Knows nothing of games.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from unstable_lite.config import Config
from unstable_lite.engines.tokenization import Tokenizer
from unstable_lite.errors import RequestError
from unstable_lite.games.templates import chats_in_use, find_extraction, templates_for
from unstable_lite.learner.batching import check
from unstable_lite.learner.model import Policy
from unstable_lite.learner.optimizers import make_optimizer
from unstable_lite.models import resolve_model
from unstable_lite.rng import derive_seed
from unstable_lite.sft.pairs import Pair, env_of, written_answer
from unstable_lite.types import TokenIds, TrainItem

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    items: list[TrainItem]
    left_out: Counter[str]
    """Number of pairs that were left out, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Mean agreement of the policy with pairs."""

    loss: float
    """Negative log-likelihood per token, at the run's temperature."""
    token_accuracy: float
    """Share of tokens that are the most likely ones."""
    accuracy: float
    """Share of pairs that greedy decoding would reproduce."""


class FineTuner:
    """Trainer of the adapter at `lora.initial_lora_path`, or of a fresh one."""

    def __init__(self, config: Config, device: str) -> None:
        self.policy = Policy(config, device)
        self._tokenizer = Tokenizer(resolve_model(config.model_name), config.trust_remote_code)
        self._templates = templates_for(config, self._tokenizer.prompts(chats_in_use(config)))
        self._config = config
        self._parameters = list(self.policy.parameters.values())
        self._optimizer = make_optimizer(self.policy.parameters, config.sft.learning_rate, config.learner)

    def tokenise(self, pairs: Sequence[Pair]) -> Tokenised:
        """Return the prompt's ids as in the engine, and the completion's as if sampled, with its stop token."""
        engine, limit = self._config.engine, self.policy.position_limit
        max_len = min(engine.max_model_len, self._config.learner.max_train_len or math.inf, limit)
        items: list[TrainItem] = []
        left_out: Counter[str] = Counter()
        for pair in pairs:
            env = env_of(pair, self._config.train_envs)
            template = self._templates[env.prompt_template]
            prompt = pair.prompt or template.prompt(pair.observation, env.num_players)
            completion = pair.completion or written_answer(prompt, pair.action)
            prompt_ids = self._tokenizer.encode(prompt)
            completion_ids = self._tokenizer.encode_completion(prompt, completion, template.stop)
            if len(prompt_ids) + len(completion_ids) > max_len:
                left_out["longer than max_model_len or max_train_len"] += 1
            elif len(completion_ids) > engine.max_generation_len:
                left_out["answer longer than max_generation_len"] += 1
            elif not self._tokenizer.stop_ids_with(template.stop).isdisjoint(completion_ids[:-1].tolist()):
                left_out["a stop token within the answer"] += 1
            elif not pair.completion and not _is_read_as(pair.action, completion, env.action_extraction_fn):
                left_out["an action that action_extraction_fn reads differently"] += 1
            else:
                items.append(_item(prompt_ids, completion_ids))
        check(items, self.policy.vocab_size)
        return Tokenised(items=items, left_out=left_out)

    def split(self, items: Sequence[TrainItem]) -> tuple[list[TrainItem], list[TrainItem]]:
        """Return items to train on and held-out items, with no prompt in both and at least one item to train on."""
        by_prompt: dict[bytes, list[TrainItem]] = {}
        for item in items:
            by_prompt.setdefault(item.prompt_ids.tobytes(), []).append(item)
        num_wanted, trained, held_out = self._config.sft.holdout * len(items), list[TrainItem](), list[TrainItem]()
        for group in _shuffled(list(by_prompt.values()), self._seed("holdout")):
            side = held_out if len(held_out) + len(group) <= num_wanted else trained
            side += group
        return trained, held_out

    def train(self, items: Sequence[TrainItem], after_update: Callable[[int, int, float], None]) -> list[float]:
        """Make `sft.epochs` passes over `items`; return the mean loss per token of each.

        Calls back with (update, of, loss). Raises RequestError if the loss or the gradient is not finite.
        """
        sft, losses = self._config.sft, []
        per_epoch = math.ceil(len(items) / sft.batch_size)
        for epoch in range(sft.epochs):
            order = _shuffled(items, self._seed(f"epoch {epoch}"))
            total, num_tokens = 0.0, 0
            for index in range(per_epoch):
                batch = order[index * sft.batch_size : (index + 1) * sft.batch_size]
                update, batch_tokens = epoch * per_epoch + index + 1, _num_trained(batch)
                loss = self._update(batch, batch_tokens, update)
                total, num_tokens = total + loss * batch_tokens, num_tokens + batch_tokens
                after_update(update, sft.epochs * per_epoch, loss)
            losses.append(total / num_tokens)
        return losses

    @torch.no_grad()
    def agreement(self, items: Sequence[TrainItem]) -> Agreement:
        """Measure the agreement with pairs, without training on them."""
        loss, num_hits, num_right = 0.0, 0, 0
        with self.policy.evaluating():
            for batch in self.policy.micro_batches(items):
                logp_N, _ = self.policy.logprobs(batch)
                is_hit_N = self.policy.is_most_likely(batch)
                row_N = batch.source_N // batch.tokens_BT.shape[1]
                misses_B = torch.bincount(row_N[~is_hit_N], minlength=batch.tokens_BT.shape[0])
                loss -= logp_N.sum().item()
                num_hits += int(is_hit_N.sum().item())
                num_right += int((misses_B == 0).sum().item())
        num_tokens = _num_trained(items)
        return Agreement(loss=loss / num_tokens, token_accuracy=num_hits / num_tokens, accuracy=num_right / len(items))

    def _update(self, items: Sequence[TrainItem], num_tokens: int, update: int) -> float:
        """Take an optimiser step on the mean loss over all trained tokens of `items`; return that mean."""
        loss = torch.zeros((), device=self.policy.device)
        for batch in self.policy.micro_batches(items):
            logp_N, _ = self.policy.logprobs(batch)
            part = -logp_N.sum() / num_tokens
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        norm = clip_grad_norm_(self._parameters, self._config.learner.gradient_clipping).item()
        if not math.isfinite(loss.item()) or not math.isfinite(norm):
            raise RequestError(
                f"update {update} is not finite (loss {loss.item():g}, gradient norm {norm:g}); lower sft.learning_rate"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _seed(self, purpose: str) -> int:
        return derive_seed(self._config.run.seed, "sft", purpose)


def _item(prompt_ids: TokenIds, completion_ids: TokenIds) -> TrainItem:
    """Return an item as if it had been sampled, with 0 for the fields of reinforcement learning."""
    return TrainItem(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=np.zeros(len(completion_ids), np.float32),
        reward=0.0,
        trajectory=0,
        adapter_version=0,
    )


def _is_read_as(action: str, completion: str, action_extraction_fn: str) -> bool:
    """Return whether this action would be extracted; an extraction may add brackets."""
    return find_extraction(action_extraction_fn)(completion) in ((action, True), (f"[{action}]", True))


def _num_trained(items: Sequence[TrainItem]) -> int:
    return sum(len(item.completion_ids) for item in items)


def _shuffled(items: Sequence[T], seed: int) -> list[T]:
    return random.Random(seed).sample(items, len(items))
