"""A plain padded batch: the update that a user of TRL, or of PEFT and a loop, would run.

Stands for a GRPO-style trainer's loss computation with its defaults: rows in the order in which they come, 8 at a time,
prompts padded on the left and completions on the right, gradient checkpointing, logits of all completion positions of
the micro-batch at once in float32, a token's log-probability as its logit less the log-sum-exp of all. Token ids are
given, the sampled ones. Leaves out the second policy of an importance ratio, the KL term and the logging.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unstable_lite.learner.model import Policy
from unstable_lite.types import TrainItem

ROWS = 8


def update(
    policy: Policy,
    items: Sequence[TrainItem],
    optimizer: torch.optim.Optimizer,
    *,
    divisor: float,
    gradient_clipping: float,
) -> float:
    """One optimiser step; the gradient's norm before clipping. `divisor`: as in `reference_update`."""
    for start in range(0, len(items), ROWS):
        rows = items[start : start + ROWS]
        prompt_BP, is_prompt_BP = _padded([row.prompt_ids for row in rows], on_the_left=True)
        completion_BC, is_completion_BC = _padded([row.completion_ids for row in rows], on_the_left=False)
        tokens_BT = torch.cat([prompt_BP, completion_BC], 1).to(policy.device)
        mask_BT = torch.cat([is_prompt_BP, is_completion_BC], 1).to(policy.device)
        num_completion = completion_BC.shape[1]
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=policy.dtype == torch.bfloat16):
            output = policy.model(
                input_ids=tokens_BT,
                attention_mask=mask_BT,
                use_cache=False,
                logits_to_keep=num_completion + 1,
            )
        logits_BCV = output.logits[:, :-1].float()
        target_BC = tokens_BT[:, -num_completion:]
        logp_BC = logits_BCV.gather(-1, target_BC[..., None]).squeeze(-1) - logits_BCV.logsumexp(-1)
        advantage_B = torch.tensor([row.reward for row in rows], device=policy.device)
        logp_BC = logp_BC * mask_BT[:, -num_completion:]
        loss = -(advantage_B[:, None] * logp_BC).sum() / divisor / len(items)
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), gradient_clipping)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def _padded(sequences: Sequence[object], on_the_left: bool) -> tuple[Tensor, Tensor]:
    """Token ids as one rectangle, and which of them are no padding."""
    tensors = [torch.as_tensor(ids, dtype=torch.int64) for ids in sequences]
    side = "left" if on_the_left else "right"
    tokens = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)
    ones = [torch.ones_like(ids) for ids in tensors]
    return tokens, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)
