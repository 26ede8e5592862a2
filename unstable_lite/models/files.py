"""Faults of a local model's files, found in their headers and tables; `check` reads them, and every load does first.

Loads neither torch nor transformers, and no weights. Refuses only faults that are certain without the architecture;
loading.py compares with it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unstable_lite.adapters.peft_files import Entry, read_header
from unstable_lite.errors import AdapterError, ModelError
from unstable_lite.models import chat_template, model_errors, read_json, read_tokenizer, resolve_model
from unstable_lite.models.gguf_cache import run_alone
from unstable_lite.models.local_tokenizer import find_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TABLES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
LFS = b"version https://git-lfs.github.com/spec/"
ADVICE = "is the model's download complete?"
BUFFERS = (".inv_freq", ".masked_bias", ".position_ids")
"""Ends of the names of buffers that models once saved and now compute."""
PACKAGES = {"gptq": "gptqmodel", "awq": "gptqmodel", "fbgemm_fp8": "fbgemm_gpu", "quanto": "optimum"} | {
    name: name.replace("-", "_")
    for name in ("aqlm", "auto-round", "bitsandbytes", "compressed-tensors", "eetq", "hqq", "quark", "torchao", "vptq")
}
"""Package with which transformers reads each kind of quantised weights."""
ALIKE = {
    *("afmoe", "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2"),
    *("gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "helium", "llama"),
    *("ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
}
"""Types of models whose layers have the same tensors, apart from their type in config.json and from experts."""

_TEXT = r"(?:(?:model|language_model|text_model|transformer|gpt_neox|decoder)\.)*"
_LAYER = re.compile(_TEXT + r"(?:layers|h)\.(\d+)\.(.+)")
_EMBEDDING = re.compile(_TEXT + r"(?:embed_tokens|wte|embed_in|word_embeddings)\.weight")
_SIZE = re.compile(
    r"(?:hidden|intermediate|vocab)_size|head_dim|num_(?:hidden_layers|(?:attention|key_value)_heads)|max_position_.*"
)
_KINDS = dict.fromkeys(("text_config", "quantization_config", "per_layer_config"), dict) | {
    **dict.fromkeys(("layer_types", "layers_block_type", "block_types", "no_rope_layers", "architectures"), list),
    **dict.fromkeys(("num_nextn_predict_layers", "attention_chunk_size"), int),
    "model_type": str,
}
"""Types of the entries of config.json that are read here and in layers.py."""
_NO_LM = re.compile(r"For\w*(?:Classification|Reward|QuestionAnswering|MaskedLM|MultipleChoice)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


def file_problems(model: Path, prompts: Iterable[str] | None = None) -> list[str]:
    """Return the faults of the files in a model directory; none for anything else, such as a hub's name.

    prompts: texts of the prompts that the model will get; None if no tokenizer is used.
    """
    if not model.is_dir():
        return []
    try:
        with model_errors(model, "cannot be read"):
            return [*_problems(model, prompts)]
    except ModelError as error:
        return [str(error)]


def check_weights(model_name: str, trust_remote_code: bool) -> str:
    """Compare names and shapes of all weights with the architecture, in a process that loads torch; return a message.

    Raises ModelError if they differ.
    """
    if reason := run_alone("compare", resolve_model(model_name), str(int(trust_remote_code))):
        raise ModelError(reason)
    return f"\n{model_name}: names and shapes of its weights are those of its config.json."


def listed(names: Collection[str], most: int = 8) -> str:
    """Return the first names in their order, and the number of the others."""
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _problems(model: Path, prompts: Iterable[str] | None) -> Iterator[str]:
    for path in model.iterdir():
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS):
            raise ModelError(f"{path} is a pointer of Git LFS, not the file; run `git lfs pull` in {model}")
    config = read_json(model / "config.json")
    if (model / "adapter_config.json").is_file():
        yield f"{model} also holds an adapter, whose base would be loaded instead; move its adapter_config.json away"
    tables = {name: read_json(model / name) for name in TABLES if (model / name).is_file()} | {"config.json": config}
    for name in (TABLES[0], "config.json"):
        ends, size = tables.get(name, {}).get("eos_token_id"), config.get("vocab_size")
        largest = size if type(size) is int else 1 << 62
        some = ends if isinstance(ends, list) else [ends]
        if not all(type(end) is int and end < largest for end in some if end is not None):
            yield f"{model / name}: eos_token_id = {ends!r} is not a token's id below vocab_size, or a list of them"
    if wrong := [f"{model / 'config.json'}: {problem}" for problem in _config_problems(config)]:
        yield from wrong
        return
    text: dict[str, Any] = config.get("text_config") or config
    rows, tensors = None, {}
    is_quantised, are_elsewhere = bool(config.get("quantization_config")), bool(config.get("transformers_weights"))
    # Quantised weights may be in files of other names and forms, of which transformers or vLLM knows more.
    with suppress(ModelError) if is_quantised else nullcontext():
        headers = {} if are_elsewhere else shard_headers(model)
        tensors = {name: entry for header in headers.values() for name, entry in header.items()}
    if is_quantised:
        yield from (f"{model}: {problem}" for problem in _scale_problems(tensors))
    elif not are_elsewhere:
        rows = next((entry.shape[0] for name, entry in tensors.items() if _EMBEDDING.fullmatch(name)), None)
        yield from (f"{model}: {problem}" for problem in _layer_problems(tensors, text))
        if whole := [
            name for name, (dtype, _) in tensors.items() if name.endswith("_proj.weight") and dtype[0] in "IU"
        ]:
            yield f"{model}: its weights {listed(whole)} are integers, and config.json names no quantisation"
        size, is_alike = text.get("vocab_size"), text.get("model_type") in ALIKE
        if (rows is None and is_alike) or (rows and size and (rows < size or (rows > size and is_alike))):
            yield f"{model}: the embedding has {rows or 'no'} rows, and config.json says vocab_size = {size}"
    if prompts is not None:
        yield from _token_problems(model, rows, prompts)


def _config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    text = config.get("text_config") or config
    for key, kind in _KINDS.items():
        for value in [table[key] for table in (config, text) if isinstance(table, dict) and table.get(key)][:1]:
            if not isinstance(value, kind):
                yield f"{key} = {value!r} is not of type {kind.__name__}"
                return
    quantised = config.get("quantization_config") or {}
    method = quantised.get("quant_method")
    if method is not None and not _is_known(method, "quantizers/auto.py"):
        yield f"the installed transformers does not know quant_method = {method!r}; take the weights unquantised"
    if (package := PACKAGES.get(str(method))) is not None and importlib.util.find_spec(package) is None:
        yield f"the weights are quantised by {method!r}, which needs the package {package}; take them unquantised"
    if others := [name for name in config.get("architectures") or () if _NO_LM.search(str(name))]:
        yield f"architectures = {others} is not a causal language model"
    if not config.get("auto_map") and not _is_known(config.get("model_type"), "models/auto/*.py"):
        yield f"the installed transformers does not know model_type = {config.get('model_type')!r}"
    for key, size in text.items():
        if (
            _SIZE.fullmatch(key)
            and size is not None
            and not (isinstance(size, list) and not key.startswith(("vocab", "hidden", "max")))
            and (type(size) is not int or size < 1)
        ):
            yield f"{key} = {size!r} is not a positive integer"


def _is_known(kind: object, files: str) -> bool:
    """Return whether the source of transformers names a type of models or weights; True if it names none as usual."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    tables = [file for file in Path(spec.origin).parent.glob(files) if re.search("conf|map|^auto", file.name)]
    source = "".join(file.read_text(encoding="utf-8") for file in tables)
    return re.search(rf'"{re.escape(str(kind))}(_[48]bit)?"', source) is not None or not re.search(
        '"(llama|gptq)"', source
    )


def _scale_problems(tensors: Mapping[str, Entry]) -> Iterator[str]:
    """Yield the 8-bit floats of quantised weights without a scale, which transformers would take to be 1."""
    scaled = {name.rpartition(".")[0] for name in tensors if "scale" in name.rpartition(".")[2]}
    bare = [name for name, (dtype, _) in tensors.items() if dtype[:2] == "F8" and name.endswith(".weight")]
    if lacking := [name for name in bare if name.rpartition(".")[0] not in scaled]:
        yield f"its quantised weights {listed(lacking)} have no scale; {ADVICE}"


def shard_headers(model: Path) -> dict[str, dict[str, Entry]]:
    """Return the tensors of each file that transformers loads, by name.

    Raises ModelError if one is missing or damaged, or if the index lists other tensors than the files have.
    """
    index, places = model / INDEX, None
    if not (model / WEIGHTS).is_file():
        if not index.is_file():
            pickles = [path.name for path in model.glob("pytorch_model*.bin")]
            only = f", only {listed(pickles)}, a pickle, which may run code: save it as safetensors" if pickles else ""
            raise ModelError(f"{model} cannot be loaded: it has no {WEIGHTS}{only or f'; {ADVICE}'}")
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
            raise ModelError(f"{index}: its weight_map is not a table of files")
    files = sorted({WEIGHTS} if places is None else set(places.values()))
    if absent := [file for file in files if not (model / file).is_file()]:
        raise ModelError(f"{model}: {INDEX} lists {listed(absent)}, which is not there; {ADVICE}")
    try:
        headers = {file: read_header(model / file, dtypes=None) for file in files}
    except AdapterError as error:
        raise ModelError(f"{error}; {ADVICE}") from error
    if places is not None:
        pairs = {(name, file) for file, header in headers.items() for name in header}
        if strays := [f"{name} in {file}" for name, file in places.items() ^ pairs]:
            raise ModelError(f"{index} and the headers of its files differ: {listed(strays)}; {ADVICE}")
    return headers


def _layer_problems(tensors: Mapping[str, Entry], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tensors that a layer or an expert lacks although another one of its kind has them."""
    layers: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    kinds: dict[Any, dict[str, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for name, entry in tensors.items():
        layer, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
        if expert is not None:
            kinds[expert[1]][f"{expert[1]}.{expert[2]}"][expert[3]] = entry.shape
        if layer is not None and not name.endswith(BUFFERS):
            layers[int(layer[1])]["experts" if expert else layer[2]] = () if expert else entry.shape
    number = text.get("num_hidden_layers") or text.get("n_layer")
    if text.get("model_type") in ALIKE and type(number) is int:
        # One more than there are shows that some are missing; a damaged number may be huge.
        expected = set(range(min(number, max(layers, default=0) + 2)))
        more = range(number, number + (text.get("num_nextn_predict_layers") or 0))
        if others := [str(index) for index in expected ^ {index for index in layers if index not in more}]:
            where = "have no" if int(others[0]) in expected else "have a"
            yield f"its weights {where} layer {listed(others)}, and config.json says num_hidden_layers = {number}"
        types = text.get("layer_types") or [None] * len(expected)
        for index in sorted(expected & set(layers)):
            has_experts = any("experts" in name for name in layers[index])
            kinds[(*types[index : index + 1], has_experts)][f"layer {index}"] = layers[index]
    for alike in kinds.values():
        yield from _differences(alike)


def _differences(alike: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Iterator[str]:
    """Yield the parts that lack a name of another part, or have it in another shape."""
    first = {name: part for part, own in reversed([*alike.items()]) for name in own}
    for part, own in alike.items():
        if lacking := [name for name in first if name not in own]:
            yield f"{part} lacks {listed(lacking)}, which {first[lacking[0]]} has"
        if other := [name for name, shape in own.items() if shape != alike[first[name]][name]]:
            yield f"{part} has {listed(other)} in another shape than {first[other[0]]}"


def _token_problems(model: Path, rows: int | None, prompts: Iterable[str]) -> Iterator[str]:
    """Yield the tokens without a row in the embedding that a prompt may contain.

    A special token that appears in no prompt needs none: text-only Gemma 3 has one for images.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        if not [name for pattern in ("tok*", "vocab*", "*.model", "*.tiktoken") for name in model.glob(pattern)]:
            yield f"{model} has no tokenizer; {ADVICE}"
        elif {*model.glob("*.model")} - {*model.glob("*tiktoken*")} and importlib.util.find_spec(
            "sentencepiece"
        ) is None:
            yield f"{model} has no tokenizer.json, and reading its tokenizer.model needs the package sentencepiece"
        return
    table, named = read_tokenizer(path), _special_tokens(model)
    with model_errors(path, "is not a tokenizer"):
        find_tokenizer(str(model))
        vocab, added = (table.model and table.model.vocab) or {}, table.added_tokens or []
        ids = vocab.copy() if isinstance(vocab, dict) else {piece: index for index, (piece, *_) in enumerate(vocab)}
        ids |= {token["content"]: token["id"] for token in added}
        special = {token["content"] for token in added if token["special"]}
        for key in ("bos_token", "eos_token"):
            if (token := named.get(key, "")) and token not in ids and token not in _other_tokens(model):
                yield f"{path} has no {token!r}, which tokenizer_config.json names as its {key}"
        before = json.dumps(table.post_processor, ensure_ascii=False)
        used = " ".join(
            [*prompts, chat_template(model), before, named.get("bos_token", ""), named.get("eos_token", "")]
        )
        beyond = [token for token in ids if rows and ids[token] >= rows and (token not in special or token in used)]
    if beyond:
        some = [f"{token!r} (id {ids[token]})" for token in beyond]
        yield f"{path}: the embedding has {rows} rows, none for {listed(some)}; take the tokenizer of these weights"


def _special_tokens(model: Path) -> dict[str, str]:
    """Return the special tokens that a chat template may use, by name."""
    path = model / "tokenizer_config.json"
    table = read_json(path) if path.is_file() else {}
    tokens = {key: value for key, value in table.items() if key.endswith("_token") and value}
    return {key: str(value.get("content") if isinstance(value, dict) else value) for key, value in tokens.items()}


def _other_tokens(model: Path) -> set[str]:
    """Return the tokens that transformers adds to those of tokenizer.json."""
    decoder, added = (
        (read_json(path) if (path := model / name).is_file() else {}) for name in (TABLES[1], "added_tokens.json")
    )
    return {str(token.get("content")) for token in (decoder.get("added_tokens_decoder") or {}).values()} | {*added}


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}` of chat templates, which marks what to train on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_chat_template(model: Path) -> None:
    """Raise ModelError if the chat template of a model directory does not lay out a question and its answer."""
    path = model / "chat_template.jinja"
    if not path.is_file():
        path = model / "tokenizer_config.json"

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    context: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "") | _special_tokens(
        model
    )
    context |= {"tools": None, "documents": None, "enable_thinking": True, "thinking": True}
    question = "Which move do you play?"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "This one."}]
    system = [{"role": "system", "content": "Be brief."}]
    with model_errors(path, "has a chat template that cannot lay out a question and an answer"):
        template: Any = (
            path.read_text(encoding="utf-8") if path.suffix == ".jinja" else read_json(path)["chat_template"]
        )
        if isinstance(template, list):
            template = {one["name"]: one["template"] for one in template}
        made = environment.from_string(template["default"] if isinstance(template, dict) else template)
        for size in (1, 2):
            asked = {"add_generation_prompt": size == 1}
            try:
                text = made.render(context, messages=messages[:size], **asked)
            except jinja2.TemplateError:  # some need a system text
                text = made.render(context, messages=system + messages[:size], **asked)
            if text.count(question) != 1:
                raise ModelError(f"{path}: the chat template does not show the question once: {text[:200]!r}")
