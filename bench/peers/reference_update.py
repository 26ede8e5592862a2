"""The reference's update: text in, one sample at a time, a log-softmax over the whole vocabulary at every position.

Stands for its REINFORCE learner with `mini_batch_size = 1`, its default: each step is tokenised three times (as a
whole, its prompt alone for the mask, and again for the statistics of lengths); the model stays in evaluation mode,
where gradient checkpointing does nothing; a backward pass for each sample. No importance weights. The answer's stop
token is not in the text, so it is not trained.

Given what would otherwise spoil the comparison: the prompt is the one that was shown (the reference trains on the
observation without its template), adapter and moments are float32 (there bfloat16), and a completion is not cut.
Leaves out `empty_cache` and the logging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from unstable_lite.learner.model import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStep:
    prompt: str
    completion: str
    advantage: float


def update(
    policy: Policy,
    tokenizer: Any,
    steps: Sequence[TextStep],
    optimizer: torch.optim.Optimizer,
    *,
    divisor: float,
    gradient_clipping: float,
) -> float:
    """One optimiser step; the gradient's norm before clipping. `divisor`: a constant number of tokens."""
    num_tokens = 0
    for step in steps:
        ids_T = torch.tensor(tokenizer(step.prompt + step.completion)["input_ids"], device=policy.device)
        num_prompt = len(tokenizer(step.prompt, add_special_tokens=False)["input_ids"])
        num_tokens += len(tokenizer(step.prompt + step.completion)["input_ids"])
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=policy.dtype == torch.bfloat16):
            logits_TV = policy.model(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
        logp_TV = F.log_softmax(logits_TV.float(), dim=-1)
        logp_T = logp_TV.gather(-1, ids_T[1:, None]).squeeze(-1)
        is_completion_T = torch.arange(1, len(ids_T), device=policy.device) >= num_prompt
        loss = -step.advantage * (logp_T * is_completion_T).sum() / divisor / len(steps)
        loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), gradient_clipping)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()
