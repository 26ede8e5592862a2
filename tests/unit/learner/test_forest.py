"""A forest of prefix trees gives the log-probabilities and the gradient of rows, or the policy reads rows."""

import json
import random
import re

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from fakes.learner_fixtures import turns_of_games
from fakes.random_models import LONGROPE, STOCK_MODELS, make_model
from unstable_lite.learner import batching, forest
from unstable_lite.learner.model import Policy
from unstable_lite.models.layers import no_forest

MIXED = ["sliding_attention", "full_attention"]
WINDOWED = {"sliding_window": 6, "layer_types": MIXED}


@pytest.mark.parametrize("max_tokens", [150, 10_000])
@pytest.mark.parametrize(("is_checkpointed", "most_copies"), [(False, 0), (False, 99), (True, 0), (True, 99)])
def test_forest_has_the_gradient_of_separate_rows(make_learner, max_tokens, is_checkpointed, most_copies, monkeypatch):
    monkeypatch.setattr(forest, "MOST_COPIES", most_copies)
    options = {"activation_checkpointing": is_checkpointed, "max_tokens_per_micro_batch": max_tokens}
    learner = make_learner(learner=options | {"entropy_coefficient": 0.1, "kl_coefficient": 0.1})
    items, found, computed = turns_of_games(4), [], []
    for layout in ("forest", "rows", "separate"):
        learner.policy.layout = layout
        with forest.of_blocks(16):
            trained = learner.add_gradient(items)
        gradient = torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters.values()])
        learner.training.optimizer.zero_grad(set_to_none=True)
        per_item = trained.per_item(trained.logp_N, items)
        found.append([gradient, torch.cat(per_item), torch.tensor(trained.loss)])
        computed.append(trained.metrics(0, 2.0, "kl_to_base")["tokens_computed"])
    assert 2 * computed[0] < computed[1] < computed[2] == sum(map(batching.length, items))
    for others in found[1:]:
        for of_forest, of_rows in zip(found[0], others, strict=True):
            assert (of_forest - of_rows).norm() < 1e-5 * of_rows.norm()


@pytest.mark.parametrize(
    ("name", "fields", "layout", "says"),
    [
        *((*model, "forest", "") for model in STOCK_MODELS),
        *((name, WINDOWED, "forest", "") for name in ("Gemma3Text", "Olmo3", "Cohere2")),
        ("Exaone4", WINDOWED, "forest", ""),
        *((name, {"sliding_window": 6}, "forest", "") for name in ("Mistral", "Phi3")),
        ("Llama", {"rope_parameters": LONGROPE}, "forest", ""),
        ("Gemma2", {"sliding_window": 6}, "forest", ""),  # its attention has a soft cap
        ("GptOss", {"num_local_experts": 4, "sliding_window": 6}, "forest", ""),  # attends to sinks
        ("Lfm2", {"layer_types": ["full_attention", "conv"]}, "rows", ""),
        ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "rows", ""),
        ("Doge", {}, "rows", "does not compute forests: AttributeError"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, "rows", ""),
        ("Cohere", {}, "forest", ""),
        (
            "Gemma3Text",
            {"use_bidirectional_attention": True, "layer_types": MIXED},
            "rows",
            r"log-probabilities that differ by 0\.\d+ of .* gradients .* 0\.\d+",
        ),
    ],
)
def test_layout_follows_the_model(name, fields, layout, says, make_config, tmp_path):
    """A model that computes a forest otherwise than rows reads rows, with a warning."""
    path = make_model(tmp_path, name, **fields)
    targets = {"GPT2": ["c_attn"], "GPTNeoX": ["query_key_value"], "Bloom": ["query_key_value"], "Phi3": ["qkv_proj"]}
    lora = {"target_modules": targets.get(name, ["q_proj", "v_proj"])}
    config = make_config(lora=lora, engine={"max_model_len": 64}).model_copy(update={"model_name": str(path)})
    policy = Policy(config, "cpu")
    assert policy.layout == layout
    assert re.search(says, policy.warning or "") and (policy.warning is None) == (says == "")
    assert (no_forest(json.loads((path / "config.json").read_text()), False) == "") == (
        layout == "forest" or says != ""
    )


def test_layout_of_own_code_and_of_biases_by_index_is_rows():
    assert no_forest({"auto_map": {"AutoModel": "mine.Model"}}, True) and not no_forest({"auto_map": {}}, True)
    assert no_forest({"model_type": "falcon", "alibi": True}, False)
    assert no_forest({"model_type": "mpt", "attn_config": {"alibi": True}}, False)


@pytest.mark.parametrize(
    ("name", "fields", "wrong"),
    [
        ("Qwen3", {}, lambda forest, query, key, rule: key <= query),
        ("Gemma3Text", WINDOWED, lambda forest, query, key, rule: is_ancestor(forest, query, key)),
        (
            "Mistral",
            {"sliding_window": 6},
            lambda forest, query, key, rule: is_ancestor(forest, query, key) & rule(query, query, query, key),
        ),
    ],
)
def test_wrong_mask_is_noticed_at_the_start(name, fields, wrong, make_config, tmp_path, monkeypatch):
    """Tokens of other branches; no window; a window by index instead of by depth."""
    monkeypatch.setattr(forest.Forest, "sees", wrong)
    path = make_model(tmp_path, name, **fields)
    config = make_config(engine={"max_model_len": 64}).model_copy(update={"model_name": str(path)})
    policy = Policy(config, "cpu")
    assert policy.layout == "rows"
    assert re.search(r"log-probabilities that differ by .* gradients that differ by", policy.warning)


def test_forest_whose_gradient_is_not_finite_does_not_agree(make_config, monkeypatch):
    monkeypatch.setattr(forest, "_summand_of", lambda is_seen, dtype: torch.full_like(is_seen, torch.nan, dtype=dtype))
    assert Policy(make_config(), "cpu").layout == "rows"


def is_ancestor(trees: forest.Forest, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (query < trees.end_T[key])


@pytest.mark.parametrize("num_tokens", [1, 128, 129, 900])
def test_blocks_of_flex_attention_are_those_that_torch_finds(num_tokens):
    """Torch asks about every pair of tokens: half a million tokens would take 250 GB."""
    drawn, path, end = random.Random(num_tokens), list[int](), list[int]()
    for token in range(num_tokens):
        kept = drawn.choice((len(path), len(path), len(path), len(path) // 2, 0))
        for ended in path[kept:]:
            end[ended] = token
        path = [*path[:kept], token]
        end.append(num_tokens)
    trees = forest.Forest(torch.zeros(num_tokens, dtype=torch.long), torch.tensor(end))

    def mask(_, __, query, key):
        return is_ancestor(trees, query, key)

    expected = create_block_mask(mask, None, None, num_tokens, num_tokens, device="cpu").to_dense()
    assert torch.equal(trees.block_mask(lambda *_: pytest.fail("asked about tokens")).to_dense(), expected)


def test_flex_attention_computes_what_blocks_compute(make_learner, monkeypatch):
    """A CPU computes it forwards only; the gradient is a test marked gpu."""
    policy, items = make_learner().policy, turns_of_games(2)
    in_blocks = torch.cat(policy.item_logprobs(items))
    monkeypatch.setattr(forest.Forest, "blocks", forest.Forest.block_mask)
    assert torch.allclose(torch.cat(policy.item_logprobs(items)), in_blocks, atol=1e-5)
