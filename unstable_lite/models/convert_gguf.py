"""Write the model in a GGUF file as a model directory, in bfloat16, with its tokenizer.

    python -m unstable_lite.models.convert_gguf FILE DIRECTORY

Ends with a traceback whose last line is the reason if that fails; gguf_cache.py reads it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, target: Path) -> None:
    """Convert `source`, which exists, into the empty directory `target`.

    Raises SystemExit for a truncated file, and transformers' own exceptions for one that it does not support.
    """
    try:
        GGUFReader(source)  # transformers reports a truncated file in many different ways
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        sys.exit(f"it is truncated, or not a GGUF file: {error}")
    directory, name = str(source.parent), source.name
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=name, dtype=torch.float32, trust_remote_code=False
    )
    # The weights are dequantised now, and neither the directory nor an engine may treat them as quantised.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(directory, gguf_file=name, trust_remote_code=False).save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
