"""vLLM's offline `LLM`: one process that holds all requests, as in the first example of its documentation.

Stands for vLLM without this project: its own defaults, except for the model, LoRA and the limits that both sides have.
Serves the CPU and a GPU. Leaves out adapters that come and go, and requests that arrive while others are computed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from bench.engine import Told, config_of, prompts, version_of
from bench.harness import Questioner


def measure(questioner: Questioner) -> None:
    """Measure tokens per second of `LLM.generate` with the model and the adapters of `bench.engine`.

    On a GPU the environment decides whether its core has a process of its own.
    """
    arguments = questioner.arguments
    directory, device = Path(arguments["directory"]), arguments["device"]
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import transformers
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    config = config_of(directory, device=device, rows=arguments.get("rows", 64))
    lora = {"enable_lora": True, "max_loras": config.engine.max_loras, "max_lora_rank": config.lora.lora_rank}
    llm = LLM(
        model=str(directory / "model"),
        dtype=arguments["dtype"],
        max_model_len=config.engine.max_model_len,
        max_num_seqs=config.engine.max_parallel_seq,
        gpu_memory_utilization=config.engine.gpu_share,
        enforce_eager=arguments["eager"],
        disable_log_stats=True,
        seed=arguments["seed"],
        logprobs_mode="processed_logprobs",
        **(lora if arguments["has_lora"] else {}),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    rng = random.Random(arguments["seed"])
    questioner.answer({"dtype": arguments["dtype"]})
    for request in questioner.requests():
        params = SamplingParams(
            temperature=1.0, max_tokens=request["new"], logprobs=0, stop=request.get("stop"), **arguments["sampling"]
        )
        counter = Told(request["seconds"])
        while not counter.is_over:
            batch = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts(rng, request)]
            versions = [version_of(index, request["adapters"]) for index in range(len(batch))]
            adapters = [LoRARequest(f"v{v}", v, str(directory / f"v{v}")) if v else None for v in versions]
            tokens = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
            given = adapters if arguments["has_lora"] else None
            for output in llm.generate(tokens, params, lora_request=given, use_tqdm=False):
                counter.add(len(output.prompt_token_ids), len(output.outputs[0].token_ids))
        questioner.answer(counter.answer())


if __name__ == "__main__":
    measure(Questioner())
