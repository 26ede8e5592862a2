"""How fast and in how much memory does an update go, against the usual way to compute the same update?

The other side is written from the reference's published design, given its token ids: one sample at a time, a float32
log-softmax over the full vocabulary at every position of the sequence, backward for each sample, and a model in
evaluation mode, where gradient checkpointing does nothing. Same base, same adapter, same batch, same loss: both report
the norm of their gradient, and the norms must agree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench import models
from bench.harness import (
    Failure,
    Options,
    Questioner,
    Report,
    Subject,
    Subjects,
    Target,
    alternate,
    bench_config,
    cores,
    forget_peak_memory,
    memory_mb,
)
from unstable_lite.config import Config
from unstable_lite.learners.model import Policy
from unstable_lite.learners.reinforce import REINFORCELearner
from unstable_lite.types import TrainItem
from unstable_lite.workers import KEEP_MEMORY

MODULE = "bench.learner"
OURS, REFERENCE = "ours", "the reference's way"
MAX_GENERATION_LEN = 2048

CASES: dict[str, dict[str, Any]] = {
    "tiny": {"items": 100, "prompt": (60, 80), "completion": (6, 10), "vocab_size": None},
    "151k vocabulary": {"items": 2, "prompt": (500, 900), "completion": (500, 900), "vocab_size": 151_936},
}
SMALL: dict[str, dict[str, Any]] = {
    "tiny": {"items": 8, "prompt": (60, 80), "completion": (6, 10), "vocab_size": None},
    "151k vocabulary": {"items": 2, "prompt": (20, 30), "completion": (20, 30), "vocab_size": 20_000},
}


def run(options: Options) -> Report:
    report = Report(bench="learner", question="Tokens a second and memory of an update", options=options)
    cases = SMALL if options.small else CASES
    report.sizes = {**cases, "threads": cores()}
    for case, sizes in cases.items():
        with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
            arguments = {"directory": name, "seed": options.seed, **sizes}
            subjects.start(MODULE, kind="make", **arguments).close()
            sides = {
                OURS: subjects.start_in(KEEP_MEMORY, MODULE, kind="ours", **arguments),
                REFERENCE: subjects.start(MODULE, kind="reference", **arguments),
            }
            _check_agreement(sides)
            report.sizes["dtype"] = sides[OURS].facts["dtype"]
            measures = {side: _tokens_per_s(subject, options.seconds) for side, subject in sides.items()}
            samples = alternate(measures, options)
            told = {side: subject.measure(seconds=0.0) for side, subject in sides.items()}
        is_wide = sizes["vocab_size"] is not None
        speed = {side: report.add(f"{case}: {side}", "tokens/s", samples[side]) for side in sides}
        report.add_ratio(
            f"{case}: tokens/s, ours ÷ reference", speed[OURS], speed[REFERENCE], Target(bound="≥", value=3)
        )
        for what, key in (("update's peak memory", "update_mb"), ("peak memory of the process", "peak_mb")):
            rows = {side: report.add(f"{case}: {side}, {what}", "MB", [told[side][key]]) for side in sides}
            has_target = is_wide and key == "update_mb"
            target = Target(bound="≤", value=1 / 3) if has_target else None
            report.add_ratio(f"{case}: {what}, ours ÷ reference", rows[OURS], rows[REFERENCE], target)
    report.notes.append("ours keeps freed memory, as the learner of a run does (workers.KEEP_MEMORY)")
    report.notes.append(
        "update's peak memory: resident memory at its highest, less what it was before the first update "
        "(interpreter, libraries, weights); one fresh process each"
    )
    return report


def _check_agreement(sides: dict[str, Subject]) -> None:
    """Before anything is timed: do both compute the same gradient?"""
    ours, theirs = (sides[side].measure(seconds=0.0)["grad_norm"] for side in (OURS, REFERENCE))
    if abs(ours - theirs) > 0.01 * max(ours, theirs):
        raise Failure(f"the two sides do not compute the same update: gradient norms {ours:g} and {theirs:g}")


def _tokens_per_s(subject: Subject, seconds: float) -> Callable[[], float]:
    return lambda: float(subject.measure(seconds=seconds)["tokens_per_s"])


# --------------------------------------------------------------------------------------- subjects


def config_of(directory: Path) -> Config:
    return bench_config(
        model_name=str(directory / "model"),
        engine={"temperature": 1.0, "max_generation_len": MAX_GENERATION_LEN},
        # No step moves the weights, so that every update of either side is the same one.
        learner={"learning_rate": 1e-30, "weight_decay": 0.0, "importance_weight_cap": 2.0},
        lora={"initial_lora_path": str(directory / "v1") if (directory / "v1").is_dir() else None},
    )


def make(arguments: dict[str, Any]) -> None:
    directory = Path(arguments["directory"])
    if arguments["vocab_size"] is None:
        models.make_tiny(directory / "model", arguments["seed"])
    else:
        models.make_wide_vocabulary(directory / "model", arguments["vocab_size"], arguments["seed"])
    config = config_of(directory)
    models.make_adapters(config, directory, [1], arguments["seed"])
    np.savez(directory / "batch.npz", **_batch(arguments))


def _batch(arguments: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(arguments["seed"])
    columns: dict[str, Any] = {"advantages": rng.choice([-1.0, 0.5, 1.0], arguments["items"])}
    for index in range(arguments["items"]):
        for part in ("prompt", "completion"):
            size = rng.integers(*arguments[part])
            columns[f"{part}{index}"] = rng.integers(10, arguments["vocab_size"] or 200, size).astype(np.int32)
    return columns


def items_of(arguments: dict[str, Any], policy: Policy) -> list[TrainItem]:
    """As if just sampled: an engine's log-probabilities are the policy's own, so that π/μ is 1, as in the reference."""
    columns = np.load(Path(arguments["directory"]) / "batch.npz")
    items = []
    for index, advantage in enumerate(columns["advantages"]):
        prompt_ids, completion_ids = columns[f"prompt{index}"], columns[f"completion{index}"]
        logprobs, _ = policy.score(prompt_ids, completion_ids)
        items.append(
            TrainItem(
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                logprobs=logprobs,
                reward=float(advantage),
                adapter_version=0,
                trajectory=index,
            )
        )
    return items


def update_as_the_reference(policy: Policy, items: Sequence[TrainItem], optimizer: torch.optim.Optimizer) -> float:
    """One optimiser step; returns the gradient's norm before clipping."""
    for item in items:
        ids_T = torch.from_numpy(np.concatenate([item.prompt_ids, item.completion_ids]).astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=policy.dtype == torch.bfloat16):
            logits_TV = policy.model(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
        logp_TV = F.log_softmax(logits_TV.float(), dim=-1)
        logp_T = logp_TV.gather(-1, ids_T[1:, None]).squeeze(-1)
        is_completion_T = torch.arange(1, len(ids_T)) >= len(item.prompt_ids)
        loss = -item.reward * (logp_T * is_completion_T).sum() / MAX_GENERATION_LEN / len(items)
        loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), 0.2)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def measure(questioner: Questioner) -> None:
    torch.set_num_threads(cores())
    arguments = questioner.arguments
    config = config_of(Path(arguments["directory"]))
    if arguments["kind"] == "ours":
        learner = REINFORCELearner(config, "cpu")
        policy = learner.policy

        def update(items: Sequence[TrainItem]) -> float:
            return learner.update(items, version=learner.version + 1).metrics["policy_grad_norm"]
    else:
        policy = Policy(config, "cpu")
        policy.model.eval()
        optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-30, weight_decay=0.0)

        def update(items: Sequence[TrainItem]) -> float:
            return update_as_the_reference(policy, items, optimizer)

    items = items_of(arguments, policy)
    if arguments["kind"] == "reference":
        policy.model.eval()  # scoring leaves it in training mode
    num_tokens = sum(len(item.prompt_ids) + len(item.completion_ids) for item in items)
    before_mb = memory_mb("now")
    forget_peak_memory()
    questioner.answer({"tokens": num_tokens, "before_mb": before_mb, "dtype": str(policy.dtype).removeprefix("torch.")})
    for request in questioner.requests():
        updates, started, norm = 0, time.perf_counter(), 0.0
        while updates == 0 or time.perf_counter() - started < request["seconds"]:
            norm = update(items)
            updates += 1
        peak_mb = memory_mb("peak")
        questioner.answer(
            {
                "tokens_per_s": updates * num_tokens / (time.perf_counter() - started),
                "grad_norm": norm,
                "peak_mb": peak_mb,
                "update_mb": peak_mb - before_mb,
            }
        )


if __name__ == "__main__":
    questioner = Questioner()
    if questioner.arguments["kind"] == "make":
        make(questioner.arguments)
        questioner.answer({})
    else:
        measure(questioner)
