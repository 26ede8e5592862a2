"""Training of the adapter on pairs: completion tokens after their prompts, stop token included.

Owns the tokenisation of pairs, with the engines' code, the split and the loss; each update takes the learner's steps.
Knows nothing of games.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

import torch

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import RequestError
from unstable_lite.games.answers import find_extraction, written_answer
from unstable_lite.games.templates import chats_in_use, templates_for
from unstable_lite.learner.batching import check, unsampled
from unstable_lite.learner.training import Training, Update
from unstable_lite.learner.training_stats import Trained
from unstable_lite.models import resolve_model
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.rng import derive_seed
from unstable_lite.sft.pairs import PAIRS, Pair
from unstable_lite.types import TrainItem

T = TypeVar("T")


class FineTuner:
    """Trainer of the adapter at `lora.initial_lora_path`, or of a fresh one."""

    def __init__(self, config: Config, device: str) -> None:
        rate = {"learning_rate": config.sft.learning_rate, "learning_rate_schedule": "constant"}
        self._config = config
        self._training = Training(config.changed(learner=rate | {"learning_rate_warmup": 0}), device)
        self.policy = self._training.policy
        self._tokenizer = Tokenizer(resolve_model(config.model_name), config.trust_remote_code)
        self._templates = templates_for(config, self._tokenizer.prompts(chats_in_use(config)))

    def fine_tune(self, pairs: Sequence[Pair], progress: TerminalInterface) -> tuple[dict[str, float], Counter[str]]:
        """Train on `pairs` and write the adapter into `sft.output`.

        Return metrics, and the number of pairs that were not trained on, by reason. Raises RequestError if no pair can
        be trained on, or if an update is not finite.
        """
        output, (items, left_out) = self._config.sft.output, self.tokenise(pairs)
        if not items:
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise RequestError(f"none of the pairs in {output / PAIRS} can be trained on: {reasons}")
        train, held_out = self.split(items)
        before, losses = self.agreement(held_out, "before"), self.train(train, progress)
        metrics = before | self.agreement(held_out, "after")
        metrics |= {"num_trained": float(len(train)), "num_held_out": float(len(held_out))}
        metrics |= {"train_loss_first_epoch": losses[0], "train_loss_last_epoch": losses[-1]}
        try:
            peft_files.write_files(output, *self.policy.adapter_state())
        except OSError as error:
            raise RequestError(peft_files.explain(error, output, self.policy.adapter_bytes)) from error
        return metrics, left_out

    def tokenise(self, pairs: Sequence[Pair]) -> tuple[list[TrainItem], Counter[str]]:
        """Return items, and the number of pairs that were left out, by reason.

        The prompt's ids are those of the engine, the completion's as if it had been sampled, with its stop token.
        """
        engine, limit = self._config.engine, self.policy.position_limit
        max_len = min(engine.max_model_len, self._config.learner.max_train_len or math.inf, limit)
        first, *_ = self._config.train_envs
        envs = {env.env_id: env for env in reversed(self._config.train_envs)}
        items, left_out = list[TrainItem](), Counter[str]()
        for pair in pairs:
            env = envs.get(pair.env_id, first)
            template = self._templates[env.prompt_template]
            prompt = pair.prompt or template.prompt(pair.observation, env.num_players)
            completion = pair.completion or written_answer(prompt, pair.action, template.tags)
            prompt_ids = self._tokenizer.encode(prompt)
            completion_ids = self._tokenizer.encode_completion(prompt, completion, template.stop)
            read = find_extraction(env.action_extraction_fn, template.tags)  # it may add brackets
            if len(prompt_ids) + len(completion_ids) > max_len:
                left_out["longer than max_model_len or max_train_len"] += 1
            elif len(completion_ids) > engine.max_generation_len:
                left_out["answer longer than max_generation_len"] += 1
            elif not self._tokenizer.stop_ids_with(template.stop).isdisjoint(completion_ids[:-1].tolist()):
                left_out["a stop token within the answer"] += 1
            elif not pair.completion and read(completion) not in ((pair.action, True), (f"[{pair.action}]", True)):
                left_out["an action that action_extraction_fn reads differently"] += 1
            else:
                items.append(unsampled(prompt_ids, completion_ids))
        check(items, self.policy.vocab_size)
        return items, left_out

    def split(self, items: Sequence[TrainItem]) -> tuple[list[TrainItem], list[TrainItem]]:
        """Return items to train on and held-out items, with no prompt in both and at least one item to train on."""
        by_prompt: dict[bytes, list[TrainItem]] = {}
        for item in items:
            by_prompt.setdefault(item.prompt_ids.tobytes(), []).append(item)
        num_wanted, trained, held_out = self._config.sft.holdout * len(items), list[TrainItem](), list[TrainItem]()
        for group in self._shuffled(list(by_prompt.values()), "holdout"):
            side = held_out if len(held_out) + len(group) <= num_wanted else trained
            side += group
        return trained, held_out

    def train(self, items: Sequence[TrainItem], progress: TerminalInterface) -> list[float]:
        """Make `sft.epochs` passes over `items`, and return the mean loss per token of each.

        Raises RequestError if the loss or the gradient is not finite.
        """
        sft, number, losses = self._config.sft, 0, []
        progress.start(total := sft.epochs * math.ceil(len(items) / sft.batch_size))
        for epoch in range(sft.epochs):
            order, summed_loss = self._shuffled(items, f"epoch {epoch}"), 0.0
            for start in range(0, len(order), sft.batch_size):
                batch, number = order[start : start + sft.batch_size], number + 1
                loss = self._update(batch, number)
                summed_loss += loss * _num_trained(batch)
                progress.show_update(number, total, f"loss {loss:.4f}")
            losses.append(summed_loss / _num_trained(items))
        return losses

    def _update(self, items: Sequence[TrainItem], number: int) -> float:
        """Take an optimiser step on the mean loss over all trained tokens of `items`; return that mean."""
        update, trained = Update(self._training, items), Trained()
        for batch in self.policy.micro_batches(update.items):
            logp_N, entropy_N = self.policy.logprobs(batch)
            loss = -logp_N.sum() / _num_trained(items)
            loss.backward()  # type: ignore[no-untyped-call]
            trained.add(batch, logp_N, entropy_N, None, loss)
        if not update.step(trained):
            raise RequestError(f"update {number} is {update.skipped}; lower sft.learning_rate")
        return update.loss

    @torch.no_grad()
    def agreement(self, items: Sequence[TrainItem], when: str) -> dict[str, float]:
        """Return how far the policy agrees with pairs, under names that end with `when`; empty without a pair.

        loss: negative log-likelihood per token, at the run's temperature. token_accuracy: share of tokens that are the
        most likely ones. accuracy: share of pairs that greedy decoding would reproduce.
        """
        hits = [torch.empty(0)] * len(items)
        with self.policy.evaluating():
            for batch in self.policy.micro_batches(items):
                batch.scatter(self.policy.is_most_likely(batch).double().cpu(), hits)
        if not items:
            return {}
        return {
            f"loss_{when}": -torch.cat(self.policy.item_logprobs(items)).double().mean().item(),
            f"token_accuracy_{when}": torch.cat(hits).mean().item(),
            f"accuracy_{when}": fmean(is_hit.min().item() for is_hit in hits),
        }

    def _shuffled(self, items: Sequence[T], purpose: str) -> list[T]:
        seed = derive_seed(self._config.run.seed, "sft", purpose)
        return random.Random(seed).sample(items, len(items))


def _num_trained(items: Sequence[TrainItem]) -> int:
    return sum(len(item.completion_ids) for item in items)
