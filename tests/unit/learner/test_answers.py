"""Answers after a shared prompt are computed as whole sequences, with any kind of layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from unstable_lite.learner.answers import answer_hidden, make_answer_batches

SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, Any] = {
    "Qwen3": lambda: transformers.Qwen3Config(**SMALL, **HEADS),
    "Gemma3 with a window": lambda: transformers.Gemma3TextConfig(
        **SMALL, **HEADS, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "LFM2 with convolutions": lambda: transformers.Lfm2Config(
        **SMALL, **HEADS, layer_types=["conv", "full_attention"] * 2
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [8, 40, 10_000])
def test_answers_after_a_shared_prompt_are_computed_as_whole_sequences(name, max_tokens):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    decoder, rng = model.get_decoder(), np.random.default_rng(0)
    prompts = [rng.integers(2, 60, length).astype(np.int32) for length in (5, 9, 5, 7)]
    sizes: tuple[tuple[int, ...], ...] = ((1, 3), (2,), (4, 1, 2), ())
    answers = [[rng.integers(2, 60, length).astype(np.int32) for length in lengths] for lengths in sizes]
    seen = set()
    with torch.no_grad():
        for batch in make_answer_batches(prompts, answers, max_tokens):
            assert len(batch.answers) == 1 or len(batch.answers) * batch.prompt_BP.shape[1] <= max_tokens
            hidden_KAD = answer_hidden(decoder, batch)
            for k, (row, option) in enumerate(batch.answers):
                seen.add((row, option))
                whole = torch.from_numpy(np.concatenate([prompts[row], answers[row][option]]).astype(np.int64))
                expected = decoder(input_ids=whole[None]).last_hidden_state[0, len(prompts[row]) - 1 : -1]
                assert torch.allclose(hidden_KAD[k, : len(expected)], expected, atol=2e-5)
                assert batch.is_token_KA[k].sum() == len(answers[row][option])
    assert seen == {(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)}
