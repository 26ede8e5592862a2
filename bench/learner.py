"""Speed and memory of an update, against the usual ways to compute the same update.

The other sides are peers: the reference's way (`bench/peers/reference_update.py`), which receives text (decoding the
ids to text counts as its time; it is far under a hundredth), and a plain padded batch (`bench/peers/padded_update.py`).
Same base, same adapter, same batch, same loss: all report the norm of their gradient, and the norms must agree.

Also: the longest sequence that fits, the cost of each option, and the share of the machine's peak arithmetic that is
used.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench import models
from bench.harness import (
    MB,
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
    letters,
    memory_mb,
)
from bench.peers import padded_update, reference_update
from unstable_lite.config import Config
from unstable_lite.learner import Learner, batching, load_learner
from unstable_lite.learner.model import Policy
from unstable_lite.orchestrator.workers import KEEP_MEMORY
from unstable_lite.planning import memory
from unstable_lite.planning.placement import Placement
from unstable_lite.types import TokenIds, TrainItem

MODULE = "bench.learner"
OURS, REFERENCE, PADDED = "ours", "the reference's way", "peer: a padded batch"
MAX_GENERATION_LEN = 2048

CASES: dict[str, dict[str, Any]] = {
    "tiny": {"items": 100, "prompt": (60, 80), "completion": (6, 10), "vocab_size": None},
    "tiny, games": {"items": 60, "turns": 6, "prompt": (60, 80), "completion": (6, 10), "vocab_size": None},
    "151k vocabulary": {"items": 2, "prompt": (500, 900), "completion": (500, 900), "vocab_size": 151_936},
}
SMALL: dict[str, dict[str, Any]] = {
    "151k vocabulary": {"items": 2, "prompt": (20, 30), "completion": (20, 30), "vocab_size": 20_000},
}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "1.7 billion parameters": {
        "items": 32, "prompt": (300, 700), "completion": (100, 700), "vocab_size": 151_936, "body": "1.7B",
    },
}  # fmt: skip
WIDE = "151k vocabulary"
DEFAULT = "defaults"
OPTIONS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "no checkpointing": {"learner": {"activation_checkpointing": False}},
    "float32 base": {"learner": {"dtype": "float32"}},
    "bfloat16 base": {"learner": {"dtype": "bfloat16"}},
    "KL to the base": {"learner": {"kl_coefficient": 0.1}},
    "a2c": {"algorithm": "a2c"},
    "ppo, 1 epoch": {"algorithm": "ppo", "learner": {"ppo_epochs": 1}},
    "grpo, 1 epoch": {"algorithm": "grpo", "learner": {"ppo_epochs": 1}},
}
BUDGETS_GB = (2, 4)
NOTES = (
    "ours keeps freed memory, as the learner of a run does (workers.KEEP_MEMORY)",
    "update's peak memory: peak of tensors, counted by the allocator, less those before the update (weights, "
    "moments); peak memory of the process: resident, interpreter and libraries included",
    "share of peak: 4 operations per token for each weight of the decoder's layers, and for each of the head's if "
    "the token is trained (forward, and backward through a frozen base; recomputation does not count), divided by "
    "the speed of a large matrix product in the base's type in the same process",
)


def run(options: Options) -> Report:
    report = Report(bench="learner", question="Tokens a second and memory of an update", options=options)
    cases = (SMALL if options.small else CASES) | (ON_A_GPU if options.device != "cpu" and not options.small else {})
    report.sizes = {**cases, "threads": cores(), "device": options.device}
    for case, sizes in cases.items():
        with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
            arguments = {"directory": name, "seed": options.seed, "device": options.device, **sizes}
            subjects.start(MODULE, kind="make", **arguments).close()
            measure_sides(report, case, subjects, arguments)
            optional = subjects.start_in(KEEP_MEMORY, MODULE, kind="options", **arguments)
            _report_options(report, case, optional, options)
    report.notes += NOTES
    return report


def measure_sides(report: Report, case: str, subjects: Subjects, arguments: dict[str, Any]) -> None:
    """Compare ours with both peers on the model and the batch that the subject of kind "make" wrote."""
    options = report.options
    sides = {
        OURS: subjects.start_in(KEEP_MEMORY, MODULE, kind="ours", **arguments),
        REFERENCE: subjects.start(MODULE, kind="reference", **arguments),
        PADDED: subjects.start(MODULE, kind="padded", **arguments),
    }
    check_agreement(sides, options.device)
    report.sizes["dtype"] = sides[OURS].info["dtype"]
    measures = {side: tokens_per_s(subject, options.seconds) for side, subject in sides.items()}
    samples = alternate(measures, options)
    counted = {side: subject.measure(seconds=0.0, count=True) for side, subject in sides.items()}
    _report_sides(report, case, samples, counted)
    if case == WIDE:
        longest = {side: sides[side].measure(longest=True, small=options.small) for side in (OURS, REFERENCE)}
        _report_longest(report, case, longest)
    for side in sides.values():
        side.close()


def _report_sides(
    report: Report, case: str, samples: Mapping[str, list[float]], counted: Mapping[str, dict[str, Any]]
) -> None:
    speed = {side: report.add(f"{case}: {side}", "tokens/s", samples[side]) for side in counted}
    report.add_ratio(f"{case}: tokens/s, ours ÷ reference", speed[OURS], speed[REFERENCE], Target(bound="≥", value=3))
    report.add_ratio(f"{case}: tokens/s, ours ÷ {PADDED}", speed[OURS], speed[PADDED])
    cpu = {
        side: report.add(f"{case}: {side}, of processor time", "tokens/CPU s", [counted[side]["tokens_per_cpu_s"]])
        for side in counted
    }
    report.add_ratio(f"{case}: tokens/CPU s, ours ÷ reference", cpu[OURS], cpu[REFERENCE])
    for what, key in (("update's peak memory", "update_mb"), ("peak memory of the process", "peak_mb")):
        rows = {side: report.add(f"{case}: {side}, {what}", "MB", [counted[side][key]]) for side in counted}
        target = Target(bound="≤", value=1 / 3) if case == WIDE and key == "update_mb" else None
        report.add_ratio(f"{case}: {what}, ours ÷ reference", rows[OURS], rows[REFERENCE], target)
        report.add_ratio(f"{case}: {what}, ours ÷ {PADDED}", rows[OURS], rows[PADDED])
    for side in counted:
        report.add(f"{case}: {side}, share of peak", "", [counted[side]["share_of_peak"]])


def _report_longest(report: Report, case: str, longest: Mapping[str, dict[str, Any]]) -> None:
    for budget_gb in BUDGETS_GB:
        rows = {}
        for side, fitting in longest.items():
            tokens = float(fitting[str(budget_gb)])
            rows[side] = report.add(
                f"{case}: {side}, longest sequence in {budget_gb} GB", "tokens", [tokens], fitting["how"]
            )
        report.add_ratio(f"{case}: longest sequence in {budget_gb} GB, ours ÷ reference", rows[OURS], rows[REFERENCE])


def _report_options(report: Report, case: str, subject: Subject, options: Options) -> None:
    tried = [DEFAULT, "a2c"] if options.small else list(OPTIONS)
    measures = {option: tokens_per_s(subject, options.seconds, option=option) for option in tried}
    samples = alternate(measures, options)
    speed = {option: report.add(f"{case}, {option}", "tokens/s", samples[option]) for option in tried}
    counted = {
        option: report.add(
            f"{case}, {option}: update's peak memory",
            "MB",
            [subject.measure(seconds=0.0, option=option, count=True)["update_mb"]],
        )
        for option in tried
    }
    for option in tried:
        if option != DEFAULT:
            report.add_ratio(f"{case}: tokens/s, {option} ÷ {DEFAULT}", speed[option], speed[DEFAULT])
            report.add_ratio(f"{case}: update's peak memory, {option} ÷ {DEFAULT}", counted[option], counted[DEFAULT])


def check_agreement(sides: Mapping[str, Subject], device: str) -> None:
    """Raise Failure unless all sides compute the same gradient, up to rounding in bfloat16 on a GPU."""
    tolerance = 0.03 if device == "cuda" else 0.01
    norms = {side: subject.measure(seconds=0.0)["grad_norm"] for side, subject in sides.items()}
    if max(norms.values()) - min(norms.values()) > tolerance * max(norms.values()):
        listed = ", ".join(f"{side} {norm:g}" for side, norm in norms.items())
        raise Failure(f"the sides do not compute the same update: gradient norms of {listed}")


def tokens_per_s(subject: Subject, seconds: float, **request: Any) -> Callable[[], float]:
    return lambda: float(subject.measure(seconds=seconds, **request)["tokens_per_s"])


# --------------------------------------------------------------------------------------- subjects


def config_of(directory: Path, algorithm: str = "reinforce", learner: Mapping[str, Any] | None = None) -> Config:
    # No step moves the weights, so that every update of every side is the same.
    still = {"learning_rate": 1e-30, "critic_learning_rate": 1e-30, "weight_decay": 0.0, "importance_weight_cap": 2.0}
    return bench_config(
        model_name=str(directory / "model"),
        algorithm=algorithm,
        engine={"temperature": 1.0, "max_generation_len": MAX_GENERATION_LEN},
        learner={**still, **(learner or {})},
        lora={"initial_lora_path": str(directory / "v1") if (directory / "v1").is_dir() else None},
    )


def _decided(config: Config, device: str) -> Config:
    """Return the config with checkpointing decided as for a run. A GPU is shared with the processes of both peers."""
    roomy, devices = config.changed(learner={"gpu_memory_utilization": 0.5}), ("cpu" if device == "cpu" else 0,)
    placed = Placement(config=roomy, engine_devices=(), learner_devices=devices)
    return config.changed(learner=placed.decide_checkpointing()[0])


def make(arguments: dict[str, Any]) -> None:
    directory = Path(arguments["directory"])
    if arguments["vocab_size"] is None:
        models.make_tiny(directory / "model", arguments["seed"])
    else:
        body = models.BODIES[arguments.get("body", "small")]
        # A body of 1.7 billion weights is drawn on the GPU.
        device = arguments["device"] if "body" in arguments else "cpu"
        models.make_wide_vocabulary(directory / "model", arguments["vocab_size"], arguments["seed"], body, device)
    config = config_of(directory)
    models.make_adapters(config, directory, [1], arguments["seed"])
    np.savez(directory / "batch.npz", **_batch(arguments))


def _batch(arguments: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(arguments["seed"])
    some_ids = _ids_of_letters(Path(arguments["directory"]))
    columns: dict[str, Any] = {"advantages": rng.choice([-1.0, 0.5, 1.0], arguments["items"])}
    for index in range(arguments["items"]):
        parts = "prompt", "completion"
        columns |= {f"{part}{index}": rng.choice(some_ids, rng.integers(*arguments[part])) for part in parts}
        if index % arguments.get("turns", 1):  # the prompt of a later turn repeats the game
            game = [columns[f"{part}{index - 1}"] for part in parts]
            columns[f"prompt{index}"] = np.concatenate([*game, columns[f"prompt{index}"]])
    return columns


def _ids_of_letters(directory: Path) -> TokenIds:
    """Return tokens that never merge, so that their text is tokenized to the same ids."""
    text = letters(random.Random(0), 64)
    ids = np.array(_tokenizer(directory)(text)["input_ids"], np.int32)
    assert len(ids) == len(text), text
    return ids


def _tokenizer(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory / "model")


def items_of(arguments: dict[str, Any], policy: Policy) -> list[TrainItem]:
    """Read the batch as if just sampled: with the policy's own log-probabilities, so π/μ is 1 as in the reference."""
    columns = np.load(Path(arguments["directory"]) / "batch.npz")
    items = []
    for index, advantage in enumerate(columns["advantages"]):
        prompt_ids, completion_ids = columns[f"prompt{index}"], columns[f"completion{index}"]
        item = replace(batching.unsampled(prompt_ids, completion_ids), reward=float(advantage), trajectory=index)
        items.append(replace(item, logprobs=policy.score([item])[0].adapter))
    return items


def _as_text(tokenizer: Any, item: TrainItem) -> reference_update.TextStep:
    return reference_update.TextStep(
        prompt=tokenizer.decode(item.prompt_ids),
        completion=tokenizer.decode(item.completion_ids),
        advantage=item.reward,
    )


Update = Callable[[Sequence[TrainItem]], float]
"""Makes an update and returns the gradient's norm."""


def measure(questioner: Questioner) -> None:
    torch.set_num_threads(cores())
    arguments = questioner.arguments
    directory, device = Path(arguments["directory"]), arguments["device"]
    is_ours = arguments["kind"] not in ("reference", "padded")
    held: tuple[str, Learner] | None = None

    def learner_with(option: str) -> Learner:
        """Return the learner with `option`, the only one in memory: a GPU does not hold several."""
        nonlocal held
        if held is None or held[0] != option:
            held = None
            gc.collect()
            torch.cuda.empty_cache()
            held = option, load_learner(_decided(config_of(directory, **OPTIONS[option]), device), device)
        return held[1]

    if not is_ours:
        peer = Policy(config_of(directory), device)
        optimizer = torch.optim.AdamW(peer.parameters.values(), lr=1e-30, weight_decay=0.0)
        tokenizer = _tokenizer(directory)

    def policy() -> Policy:
        return learner_with(DEFAULT).training.policy if is_ours else peer

    def update_with(option: str) -> Update:
        common: dict[str, Any] = {"divisor": mean_len, "gradient_clipping": 0.2}
        if arguments["kind"] == "reference":
            return lambda items: reference_update.update(
                peer, tokenizer, [_as_text(tokenizer, item) for item in items], optimizer, **common
            )
        if arguments["kind"] == "padded":
            return lambda items: padded_update.update(peer, items, optimizer, **common)

        learner_with(option)  # loads it before the time is taken

        def update(items: Sequence[TrainItem]) -> float:
            learner = learner_with(option)
            return learner.update(items, version=learner.training.version + 1).metrics["policy_grad_norm"]

        return update

    items = items_of(arguments, policy())
    if arguments["kind"] == "reference":
        peer.model.eval()  # scoring leaves it in training mode
    num_tokens = sum(map(batching.length, items))
    mean_len = batching.fit(items, None).mean_completion_len  # the divisor of our learners
    dtype = policy().dtype
    peak_flops = flops_per_s_of_a_large_product(torch.device(device), dtype)
    forget_peak_memory()
    questioner.answer({"tokens": num_tokens, "dtype": str(dtype).removeprefix("torch.")})
    for request in questioner.requests():
        if request.get("longest"):
            questioner.answer(longest_sequences(arguments, policy(), update_with(DEFAULT), request["small"]))
            continue
        update = update_with(request.get("option", DEFAULT))
        updates, started, cpu_started, norm = 0, time.perf_counter(), time.process_time(), 0.0
        while updates == 0 or time.perf_counter() - started < request["seconds"]:
            norm = update(items)
            updates += 1
            if device != "cpu":
                torch.cuda.synchronize(device)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        is_counted = request.get("count")
        counted = {"update_mb": models.peak_bytes(partial(update, items), device) / MB} if is_counted else {}
        questioner.answer(
            {
                "tokens_per_s": updates * num_tokens / seconds,
                "tokens_per_cpu_s": updates * num_tokens / cpu_seconds,
                "grad_norm": norm,
                "peak_mb": memory_mb("peak"),
                "share_of_peak": updates * _flops_of(items, directory) / seconds / peak_flops,
                **counted,
            }
        )


def longest_sequences(arguments: dict[str, Any], policy: Policy, update: Update, is_small: bool) -> dict[str, Any]:
    """Return the tokens of the longest sequence, half of it prompt, by gigabytes besides weights and moments."""
    some_ids = _ids_of_letters(Path(arguments["directory"]))

    def counted(num_tokens: int) -> int:
        half = np.resize(some_ids, num_tokens // 2)
        return models.peak_bytes(
            lambda: update([replace(batching.unsampled(half, half), reward=1.0)]), arguments["device"]
        )

    config = config_of(Path(arguments["directory"]))
    shape = memory.shape_of(config.model_name)
    assert shape is not None
    if arguments["kind"] == "ours":
        dtype = "bfloat16" if policy.dtype == torch.bfloat16 else "float32"
        needs = memory.learner_memory(shape, config.changed(learner={"dtype": dtype}))
        still, size = needs.base + needs.adapter, 1024 if is_small else 8192
        how = f"computed; of {size} tokens {(needs.total(size) - still) / MB:.0f} MB, counted {counted(size) / MB:.0f}"
        return {"how": how} | {str(gb): needs.longest(still + int(gb * 1e9)) for gb in BUDGETS_GB}
    sizes = (32, 64, 96) if is_small else (128, 256, 384)
    peaks = [counted(size) for size in sizes]
    slope = (peaks[2] - peaks[1]) / (sizes[2] - sizes[1])
    start = peaks[2] - slope * sizes[2]
    off = abs(start + slope * sizes[0] - peaks[0]) / peaks[0]
    how = f"counted at {sizes} tokens, on a line ({off:.1%} off)"
    return {"how": how} | {str(gb): int((gb * 1e9 - start) / slope) for gb in BUDGETS_GB}


def _flops_of(items: Sequence[TrainItem], directory: Path) -> float:
    """Return the operations of an update, as the note in `run` counts them."""
    shape = memory.shape_of(str(directory / "model"))
    assert shape is not None
    head = shape.vocab_size * shape.hidden
    layers = shape.base_parameters - head * (1 if shape.is_tied else 2)
    trained = sum(len(item.completion_ids) for item in items)
    return 4.0 * (layers * sum(map(batching.length, items)) + head * trained)


def flops_per_s_of_a_large_product(device: torch.device, dtype: torch.dtype) -> float:
    size, times = (8192, 20) if device.type == "cuda" else (1024, 4)
    matrix = torch.randn(size, size, device=device).to(dtype)
    for number in range(times + 1):
        if number == 1:  # the first one warms up
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
        matrix @ matrix
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return times * 2 * size**3 / (time.perf_counter() - started)


if __name__ == "__main__":
    questioner = Questioner()
    if questioner.arguments["kind"] == "make":
        make(questioner.arguments)
        questioner.answer({})
    else:
        measure(questioner)
