"""The models that the policy loads or refuses; its log-probabilities equal the model's own."""

import errno
import json
import os
from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.qwen3 import modeling_qwen3

from fakes.game_records import make_item
from fakes.learner_fixtures import VOCAB
from fakes.random_models import LONGROPE, make_adapter, make_model, make_multimodal
from unstable_lite.adapters import peft_files
from unstable_lite.config.training import LoraConfig
from unstable_lite.engines.embedded import stock_model
from unstable_lite.errors import AdapterError, ConfigError, ModelError, NoRoomError, RequestError
from unstable_lite.learner import model as learners_model
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.learner.base_model import choose_dtype
from unstable_lite.learner.model import Policy
from unstable_lite.learner.other_adapters import read_parameters

PROMPT = np.array([5, 17, 3, 250], np.int32)
COMPLETION = np.array([7, 7, 280], np.int32)
ITEM = make_item(PROMPT, COMPLETION)


def logprobs_by_transformers(model: Any, temperature: float) -> list[float]:
    tokens = torch.tensor([*PROMPT, *COMPLETION])[None].long()
    with torch.no_grad():
        logp_TV = (model(input_ids=tokens).logits[0].double() / temperature).log_softmax(-1)
    return [logp_TV[len(PROMPT) - 1 + t, token].item() for t, token in enumerate(COMPLETION)]


def test_scores_are_those_of_the_model_with_and_without_its_adapter(make_learner):
    policy = make_learner(engine={"temperature": 2.0}).policy
    (scored,) = policy.score([ITEM])
    assert scored.adapter.dtype == scored.base.dtype == np.float32
    assert scored.adapter == pytest.approx(logprobs_by_transformers(policy.model, 2.0), abs=1e-4)
    with policy.model.disable_adapter():
        assert scored.base == pytest.approx(logprobs_by_transformers(policy.model, 2.0), abs=1e-4)
    assert np.abs(scored.adapter - scored.base).max() > 0.01


ARCHITECTURES = {
    "gemma2-softcap": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "gemma2-attention-softcap": ("Gemma2", {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 2.0}),
    "granite-scaling": ("Granite", {"logits_scaling": 3.0}),
    "cohere-scale": ("Cohere", {"eos_token_id": 2, "logit_scale": 0.3}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
}
RANDOM_IN_TRAINING = {
    "phimoe-sparsemixer": ("Phimoe", {"num_local_experts": 4, "sliding_window": None}),
    "mixtral-jitter": ("Mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.3}),
    "dropout": ("Qwen3", {"attention_dropout": 0.5}),
}


@pytest.mark.parametrize(("model", "fields"), ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_heads_of_other_architectures_are_reproduced(make_config, tmp_path, model, fields):
    make_model(tmp_path, model, **fields)
    policy = Policy(make_config().model_copy(update={"model_name": str(tmp_path)}), "cpu")
    (scored,) = policy.score([ITEM])
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert scored.adapter == pytest.approx(logprobs_by_transformers(judge, 0.7), abs=1e-4)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any:RuntimeWarning")
def test_fused_experts_are_refused_before_training(make_config, tmp_path):
    """The model's first layer is dense, so that it has modules of the requested names."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    make_model(tmp_path, "Glm4Moe", **experts, first_k_dense_replace=1)
    given = make_config().model_copy(update={"model_name": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"experts.*gate_up_proj"):
        Policy(given.model_copy(update={"lora": LoraConfig()}), "cpu")
    attention_alone = LoraConfig(target_modules=("q_proj", "v_proj"))
    Policy(given.model_copy(update={"lora": attention_alone}), "cpu").score([ITEM])


def test_sequence_past_the_short_longrope_factors_is_refused(make_config, tmp_path):
    make_model(tmp_path, "Llama", rope_parameters=LONGROPE | {"original_max_position_embeddings": 16})
    policy = Policy(make_config().model_copy(update={"model_name": str(tmp_path)}), "cpu")
    assert policy.position_limit == 16
    long = replace(ITEM, prompt_ids=np.arange(17 - len(ITEM.completion_ids), dtype=np.int32))
    policy.score([ITEM, replace(long, prompt_ids=long.prompt_ids[1:])])
    with pytest.raises(RequestError, match=r"17 tokens.* 16 .*LongRoPE"):
        policy.score([ITEM, long])


def test_unknown_head_is_refused(make_config, monkeypatch):
    original = modeling_qwen3.Qwen3ForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(modeling_qwen3.Qwen3ForCausalLM, "forward", forward)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ModelError, match="logits"):
            Policy(make_config(learner={"dtype": dtype}), "cpu")


@pytest.mark.parametrize(("model", "fields"), RANDOM_IN_TRAINING.values(), ids=RANDOM_IN_TRAINING)
def test_base_that_is_random_in_training_mode_matches_its_sampling(make_config, make_items, tmp_path, model, fields):
    make_model(tmp_path, model, vocab_size=VOCAB, **fields)
    recomputes = {"activation_checkpointing": True}
    config = make_config(lora={"target_modules": ["q_proj", "v_proj"]}, learner=recomputes)
    learner = REINFORCELearner(config.model_copy(update={"model_name": str(tmp_path)}), "cpu")
    passes: list[int] = []
    items = [replace(item, logprobs=scored.adapter) for item in make_items() for scored in learner.policy.score([item])]
    learner.policy.base.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: passes.append(1))
    for item, logprobs in zip(items, learner.update(items, 1).logprobs, strict=True):
        assert logprobs == pytest.approx(item.logprobs, abs=1e-4)
    assert len(passes) == 2, "one forward pass and one recomputation by checkpointing"


def test_adapter_dropout_is_active_only_in_training_and_differs_by_item(make_learner):
    policy = make_learner(lora={"lora_dropout": 0.5}).policy
    tokens = torch.arange(20)[None]
    for _ in range(2):
        assert not torch.equal(policy._decoded(tokens), policy._decoded(tokens))
        with policy.evaluating():
            assert torch.equal(policy._decoded(tokens), policy._decoded(tokens))
    (batch,) = policy.micro_batches([ITEM, ITEM])
    assert len(batch.tokens_BT) == 2, "equal items share no row"


def test_unknown_layers_are_in_training_mode_as_a_whole(make_config, monkeypatch):
    monkeypatch.setattr(learners_model, "GradientCheckpointingLayer", type("NotALayer", (torch.nn.Module,), {}))
    policy = Policy(make_config(), "cpu")
    assert all(module.training for module in policy.model.modules())


def test_checkpointing_recomputes_activations_and_changes_no_bit_on_the_cpu(make_learner, make_items):
    recomputed, kept = (make_learner(learner={"activation_checkpointing": is_on}) for is_on in (True, False))
    for learner, forwards in ((recomputed, 2), (kept, 1)):
        calls: list[int] = []
        learner.policy.base.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        assert learner.update(make_items(6), 1).skipped is None
        assert len(calls) == forwards
    for name, parameter in kept.training.parameters.items():
        assert torch.equal(parameter, recomputed.training.parameters[name]), name


def test_dtype_on_a_gpu_without_bfloat16_is_float32(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert choose_dtype("auto", gpu) == choose_dtype("bfloat16", gpu) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert choose_dtype("auto", gpu) == choose_dtype("float32", gpu) == torch.float32
    with pytest.raises(ModelError, match=r"learner\.dtype = 'bfloat16'.*Ampere.*'auto'"):
        choose_dtype("bfloat16", gpu)
    assert stock_model.choose_dtype("auto", gpu, width=2048) == torch.float16


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ("query", ModelError, r"Qwen3ForCausalLM.*'query'.*q_proj"),
        *((name, ConfigError, f"'{name}'") for name in ("lm_head", "embed_tokens", "model.embed_tokens")),
    ],
)
def test_impossible_lora_target_is_named(make_config, target, error, says):
    with pytest.raises(error, match=rf"lora.target_modules: .*{says}"):
        Policy(make_config(lora={"target_modules": ["q_proj", target]}), "cpu")


def test_seed_determines_the_fresh_adapter(make_config):
    config = make_config()
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
    first, again, different = (
        torch.cat([p.flatten() for p in Policy(c, "cpu").parameters.values()]) for c in (config, config, other)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


def test_written_adapter_loads_in_peft_with_equal_logits_and_has_the_fields_that_vllm_needs(
    make_learner, model_path, tmp_path
):
    policy = make_learner().policy
    peft_files.write_adapter(tmp_path / "v1", *policy.adapter_state())
    assert {path.name for path in (tmp_path / "v1").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    base = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "v1"))
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=tokens).logits, policy.model.eval()(input_ids=tokens).logits)
    config = json.loads((tmp_path / "v1/adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "base_model_name_or_path": str(model_path), "r": 4, "lora_alpha": 8}
    expected |= {"bias": "none", "use_dora": False, "modules_to_save": None, "exclude_modules": None}
    assert {key: config[key] for key in expected} == expected
    assert isinstance(config["target_modules"], list)
    tensors = safetensors.torch.load_file(tmp_path / "v1/adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors


def test_writing_an_adapter_is_all_or_nothing(make_learner, tmp_path, monkeypatch):
    policy, fsync, seen = make_learner().policy, os.fsync, []

    def is_full(descriptor: int) -> None:
        assert not (tmp_path / "v1").exists()  # no reader sees a partial version
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def look_and_sync(descriptor: int) -> None:
        seen.append(len(list((tmp_path / "v1").glob("*"))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(NoRoomError, match=r"/v1: No space left on device.* 0\.0 MB"):
        peft_files.write_adapter(tmp_path / "v1", *policy.adapter_state())
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", look_and_sync)
    peft_files.write_adapter(tmp_path / "v1", *policy.adapter_state())
    assert set(seen) == {0, 2}, "a version is visible only when it is complete"
    with pytest.raises(AdapterError, match="once"):
        peft_files.write_adapter(tmp_path / "v1", *policy.adapter_state())


def test_initial_adapter_is_the_starting_point_of_training(make_learner, tmp_path):
    first = make_learner(learner={"dtype": "bfloat16"})
    peft_files.write_adapter(tmp_path / "v1", *first.policy.adapter_state())
    config = {"lora_rank": 4, "lora_alpha": 8, "initial_lora_path": str(tmp_path / "v1")}
    second = make_learner(has_signal=False, lora=config, learner={"dtype": "bfloat16"})
    for name, parameter in first.policy.parameters.items():
        assert torch.equal(parameter, second.policy.parameters[name]), name  # exact: float32 throughout


@pytest.mark.parametrize(
    ("lora", "tensor", "message"),
    [
        ({"lora_rank": 8}, None, r"\br\b.* 4.* 8"),
        ({"lora_alpha": 16}, None, r"lora_alpha.* 8\.0.* 16"),
        ({"target_modules": ["q_proj"]}, None, r"target_modules.*\['down_proj'.*\['q_proj'\]"),
        ({}, torch.zeros(4, 99), r"\(4, 99\).*\(4, 64\)"),
    ],
)
def test_initial_adapter_of_another_shape_or_base_is_refused(
    make_learner, make_config, tmp_path, lora, tensor, message
):
    tensors, config = make_learner().policy.adapter_state()
    if tensor is not None:
        tensors[next(iter(tensors))] = tensor
    peft_files.write_adapter(tmp_path / "v1", tensors, config)
    with pytest.raises(ModelError, match=message):
        Policy(make_config(lora=lora | {"initial_lora_path": str(tmp_path / "v1")}), "cpu")
    (tmp_path / "v1/adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(AdapterError, match="safetensors"):
        Policy(make_config(lora={"initial_lora_path": str(tmp_path / "v1")}), "cpu")


def test_only_the_text_decoder_of_a_multimodal_model_is_adapted(make_config, tmp_path):
    model = make_multimodal(tmp_path / "model")
    config = make_config(lora={"lora_rank": 8, "lora_alpha": 12}).model_copy(update={"model_name": str(model)})
    policy = Policy(config, "cpu")
    critic = policy.add_adapter("critic", LoraConfig(lora_rank=8))
    assert len(policy.parameters) == len(critic) == 2 * 2 * 7
    assert [name for name in (*policy.parameters, *critic) if "language_model" not in name] == []
    older = make_adapter(model, tmp_path / "older", 1)
    tensors, _, _ = peft_files.read_adapter(older)
    assert any("vision_tower" in name for name in tensors)
    policy.load_adapter(older)
    loaded, _ = policy.adapter_state()
    assert loaded and all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.items())
    assert read_parameters(older, policy).keys() == policy.parameters.keys()
    moments = {f"exp_avg/{name}": torch.zeros(1) for name in (*policy.parameters, *tensors)}
    assert policy.of_text(moments).keys() <= moments.keys() - {
        f"exp_avg/{name}" for name in tensors if "vision" in name
    }
