"""Load a causal language model by transformers, and refuse one that is not exactly the model in its files.

    python -m unstable_lite.models.loading compare MODEL TRUST
    python -m unstable_lite.models.loading convert FILE DIRECTORY

The first compares names and shapes of MODEL's files with its architecture, without its weights; TRUST is 1 if its own
code may run. The second converts a GGUF file. Both end with code 1 if they fail, and the reason is stderr's last line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers

from unstable_lite.errors import ModelError
from unstable_lite.models import model_errors
from unstable_lite.models.files import BUFFERS, file_problems, listed, shard_headers

_REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}
_LAYER = re.compile(r"(.*?)\.(\d+)\.")
EVENT = "cannot be loaded as a causal language model"


def load_model(path: str, trust_remote_code: bool, advice: str = "", **options: Any) -> Any:
    """Return the model in a directory or of the hub, with `options` of transformers' `from_pretrained`.

    Raises ModelError if it cannot be loaded, if its files and its architecture differ, or if a weight is not finite.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with model_errors(path, EVENT, advice):
        if "gguf_file" not in options and (problems := file_problems(Path(path))):
            raise ModelError("\n".join(problems))
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=trust_remote_code, use_safetensors=True, **_REPORTED, **options
        )
    model, report = loaded
    _check_report(path, model, report)
    for name, tensor in model.state_dict().items():
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and not tensor.isfinite().all():
            raise ModelError(f"{path}: {name} has values that are not finite in {str(tensor.dtype)[6:]}")
    return model


def bare_model(path: str, trust_remote_code: bool) -> Any:
    """Return the model without weights. Raises ModelError if transformers does not support it."""
    with model_errors(path, EVENT):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=trust_remote_code
            )


def text_part(model: Any) -> str:
    """Return the prefix of the names below the text decoder, which is the whole model if it has no other part."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return next((f"{name}." for name, module in model.named_modules() if module is decoder and name), "")


def _check_report(path: str, model: Any, report: dict[str, Any]) -> None:
    """Raise ModelError if weights are missing, unexpected or of another shape that the text decoder would use.

    `report`: that of transformers, without tied weights and the names that the architecture is known to ignore.
    """
    decoder, modules = text_part(model), dict(model.named_modules())
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    of_text = (decoder, *(f"{name}." for name, module in modules.items() if module is output))
    config = model.config.get_text_config()
    predicting = range(config.num_hidden_layers, 1 << 30 if getattr(config, "num_nextn_predict_layers", None) else 0)

    def is_used(name: str) -> bool:
        """Return whether an unexpected weight lies within a module or list of layers that the model has."""
        parent, layer = name.rpartition(".")[0], _LAYER.match(name)
        if layer is None or layer[1] not in modules:
            return parent in modules and f"{parent}." != decoder
        return int(layer[2]) not in predicting and not name.endswith(BUFFERS)

    differences = {
        "missing": report["missing_keys"],
        "unexpected": filter(is_used, report["unexpected_keys"]),
        "of another shape than by config.json": (
            f"{name} {[*theirs]}" for name, theirs, _ in report["mismatched_keys"]
        ),
    }
    found = {kind: [name for name in names if name.startswith(of_text)] for kind, names in differences.items()}
    if problems := [f"{kind}: {listed(names)}" for kind, names in found.items() if names]:
        raise ModelError(f"{path}: its weights are not those of {type(model).__name__}; {'; '.join(problems)}")


def compare(path: str, trust_remote_code: bool) -> None:
    """Raise ModelError if names or shapes in the headers of the model's files are not those of its architecture."""
    with model_errors(path, "is not on this machine"):
        if not Path(path).is_dir():
            path = huggingface_hub.snapshot_download(path, local_files_only=True)
    with model_errors(path, EVENT):
        if problems := file_problems(Path(path)):
            raise ModelError("\n".join(problems))
        bare = bare_model(path, trust_remote_code)
        tensors = {
            name: torch.empty(entry.shape, dtype=torch.float32, device="meta")
            for header in shard_headers(Path(path)).values()
            for name, entry in header.items()
        }
        options = {"config": bare.config, "state_dict": tensors, "device_map": {"": "meta"}, **_REPORTED}
        model, report = type(bare).from_pretrained(None, trust_remote_code=trust_remote_code, **options)
    _check_report(path, model, report)


def convert(source: Path, target: Path) -> None:
    """Write the model in a GGUF file into the empty directory `target`, in bfloat16, with its tokenizer.

    Raises SystemExit for a truncated file, and transformers' own exceptions for one that it does not support.
    """
    from gguf import GGUFReader  # of an extra

    try:
        GGUFReader(source)  # transformers reports a truncated file in many different ways
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        sys.exit(f"it is truncated, or not a GGUF file: {error}")
    directory, name = str(source.parent), source.name
    model = load_model(directory, trust_remote_code=False, gguf_file=name, dtype=torch.float32)
    # The weights are dequantised now, and neither the directory nor an engine may treat them as quantised.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.to(torch.bfloat16).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(directory, gguf_file=name, trust_remote_code=False).save_pretrained(
        target
    )


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    task, model, argument = sys.argv[1:]
    try:
        compare(model, argument == "1") if task == "compare" else convert(Path(model), Path(argument))
    except ModelError as error:
        sys.exit("; ".join(str(error).splitlines()))
