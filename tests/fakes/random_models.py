"""Models and adapters with random weights, small enough to make within a test."""

from pathlib import Path
from typing import Any

import pytest

GGUF_TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_tokenizer(directory: Path, **special: str) -> None:
    """Save a tokenizer whose every token is a byte, so that a character may be cut in two."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|pad|>": 0, "<|end|>": 1} | {symbol: index + 2 for index, symbol in enumerate(alphabet)}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    specials = {"eos_token": "<|end|>", "pad_token": "<|pad|>"} | special
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **specials).save_pretrained(directory)


def make_model(directory: Path, name: str = "Qwen3", **fields: Any) -> Path:
    """Save a causal language model of two layers and its tokenizer."""
    import torch
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    make_tokenizer(directory)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(shape | fields))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in (parameter for name, parameter in model.named_parameters() if name.endswith("bias")):
        torch.nn.init.normal_(parameter, std=0.15)  # transformers starts with zeros, which would hide a missing bias
    model.save_pretrained(directory)
    return directory


def make_multimodal(directory: Path) -> Path:
    """Save a Gemma 3 with a vision tower whose projections have the names of the text decoder's."""
    import torch
    import transformers

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = shape | {"vocab_size": 288, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64}
    vision = shape | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    ids = {"image_token_index": 200, "boi_token_index": 201, "eoi_token_index": 202, "mm_tokens_per_image": 4}
    make_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **ids)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(directory)
    return directory


def write_gguf(path: Path, architecture: str = "llama", without: str = "") -> None:
    """Write a llama of random weights with a byte-level tokenizer of 260 tokens. without: name of a weight."""
    import gguf
    import numpy as np

    width, inner, heads, layers = 32, 64, 2, 2
    rng = np.random.default_rng(0)
    alphabet = [chr(n) for n in range(33, 127)] + [chr(n) for n in (*range(161, 173), *range(174, 256))]
    alphabet += [chr(256 + n) for n in range(256 - len(alphabet))]
    tokens = ["<s>", "</s>", *alphabet, "ab", "cd"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["a b", "c d"])  # transformers 5.6 reads a list of one merge wrongly
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(GGUF_TEMPLATE)

    def add(name: str, *shape: int) -> None:
        if name != without:
            writer.add_tensor(name, rng.normal(0, 0.05, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), width)
    add("output.weight", len(tokens), width)
    add("output_norm.weight", width)
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", width, width)
        for name, *shape in (("ffn_gate", inner, width), ("ffn_up", inner, width), ("ffn_down", width, inner)):
            add(f"blk.{layer}.{name}.weight", *shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def replace_smollm2(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put random weights in the place of the model that the first lines of examples/smollm2.toml fetch."""
    (directory / "outputs").mkdir()
    write_gguf(directory / "outputs" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.chdir(directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
STOCK_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 0.01}),
    ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    ("Qwen2", {"head_dim": 16}),  # has biases on queries, keys and values
    ("GPT2", {"n_embd": 64, "n_head": 4, "n_layer": 2}),
    ("GPTNeoX", {}),
    ("Granite", {"logits_scaling": 4.0}),  # has the modules of Llama, but computes something else
    ("Gemma", {}),
    ("Olmo2", {}),
    ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}),
    ("Afmoe", {**EXPERTS, "num_dense_layers": 1}),  # passes the mask of its attention by keyword
]
"""Architectures that every part serves, with what is unusual in them."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + 3 * index for index in range(16)],
}
"""LongRoPE parameters for heads of size 32."""


def make_adapter(model_dir: Path, directory: Path, seed: int, **fields: Any) -> Path:
    """Save a LoRA adapter that changes the model a great deal."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(seed)
    config: dict[str, Any] = {"r": 8, "lora_alpha": 12, "target_modules": list(LINEAR_LAYERS)}
    model = peft.get_peft_model(base, peft.LoraConfig(**(config | fields)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    return directory
