"""Engines that one learner rank can feed: computed on assumptions, each of which names its source in plan.toml.

`python -m bench scale` prints `tables()`, which docs/scale.md holds word for word. The learner's own code counts the
tokens of games between random players, which needs no model. Everything about a GPU is computed.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.config.games import TrainEnvSpec
from unstable_lite.config.training import LearnerConfig, LoraConfig
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.players.scripted import random_legal_action
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.learner.batching import MicroBatch, length, make_micro_batches, unsampled
from unstable_lite.planning.memory import KNOWN_SHAPES

ASSUMED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
EXAMPLE = Path(__file__).with_name("plan_example.txt").read_text(encoding="utf-8")
FEWEST, MIDDLE, MOST = range(3)
ENVS = ("SimpleTak", "TicTacToe", "Nim", "ConnectFour", "KuhnPoker", "LiarsDice")
SHOWN = ("SimpleTak", "LiarsDice")
"""Envs of the table of engines: those whose prompts repeat least and most."""
MODELS = ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B")
ANSWERS = (16, 100, 400, 1600)
ENGINES = ("rows_engines", "forest_engines")
TEMPLATE = "qwen3-zs"
PIECE = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""Pieces into which Qwen's tokenizer divides a text; in these prompts nearly all of them are one token."""


@cache
def prompts_of(env: str) -> list[list[int]]:
    """Return the tokens of the prompts of one batch: whole games of random players, the last one cut off."""
    spec = TrainEnvSpec(env_id=f"{env}-v0-train", num_players=2, num_actors=2, prompt_template=TEMPLATE)
    prompts, ids = list[list[int]](), dict[str, int]()
    steps = ASSUMED["steps"]["values"][MIDDLE]
    for seed in range(steps):
        rng, environment = random.Random(seed), environment_of(spec, seed)
        turn: tuple[int, str] | None = environment.observe()
        while turn is not None and len(prompts) < steps:
            pieces = PIECE.findall(TEMPLATES[TEMPLATE].prompt(turn[1], spec.num_players))
            prompts.append([ids.setdefault(piece, len(ids)) for piece in pieces])
            turn = environment.play(random_legal_action(spec.env_id, turn[1], rng))
    return prompts


@cache
def tokens_of(env: str, answer: int) -> dict[str, float]:
    """Count tokens as `learner/tokens_computed` does, a step. Answers are random: they share nothing with each other.

    new_prompt: those that no other prompt of the batch begins with, which an engine reads if it forgets nothing.
    rows_seen, forest_seen: mean number of tokens that a token of the learner sees, itself included.
    """
    rng, prompts = np.random.default_rng(0), [np.array(prompt, np.int32) for prompt in prompts_of(env)]
    items = [unsampled(prompt, rng.integers(100_000, 150_000, answer).astype(np.int32)) for prompt in prompts]

    def batches(most: int, of_prompts: bool) -> list[MicroBatch]:
        return make_micro_batches(items, most, None, device="cuda", of_prompts=of_prompts)

    def num_computed(batches: list[MicroBatch]) -> float:
        return sum(batch.tokens_BT.numel() - batch.num_padding for batch in batches) / len(items)

    learnt = batches(LearnerConfig().max_tokens_per_micro_batch, False)
    lengths = np.array([length(item) for item in items])
    rows_seen = float((lengths * (lengths + 1)).sum() / 2 / lengths.sum())
    depths = [batch.forest.depth_T.numpy() for batch in learnt if batch.forest is not None]
    return {
        "prompt": sum(map(len, prompts)) / len(items),
        "new_prompt": num_computed(batches(1 << 30, True)),
        "answer": answer,
        "forest_tokens": num_computed(learnt),
        "rows_seen": rows_seen,
        "forest_seen": float(np.concatenate(depths).mean()) + 1 if depths else rows_seen,  # else it is laid out in rows
    }


def compute(model: str, tokens: dict[str, float], case: int) -> dict[str, float]:
    """Return all numbers of plan_example.txt by their names, in GB, kB, ms, s, and 10⁹ weights or operations."""
    shape, n = KNOWN_SHAPES[model], dict(tokens)
    n |= {name: assumed["values"][case] for name, assumed in ASSUMED.items()}
    n |= {"num_layers": shape.layers, "queries": shape.queries, "kv": 2 * 2 * shape.layers * shape.keys / 1e3}
    n |= {"weights": 2 * shape.base_parameters / 1e9, "head": shape.vocab_size * shape.hidden / 1e9}
    n |= {"layers": (shape.base_parameters - shape.end_parameters) / 1e9}
    n |= {"lora": shape.lora_parameters(LoraConfig()) / 1e9}
    n["rows_tokens"] = n["prompt"] + n["answer"]
    n["context"] = n["prompt"] + n["answer"] / 2
    n["step_gb"] = n["weights"] + n["rows"] * n["context"] * n["kv"] / 1e6
    n["step_ms"] = 1e3 * n["step_gb"] / (n["read"] * n["bandwidth"]) + n["host"]
    n["prompt_ms"] = n["new_prompt"] * 2 * n["layers"] / (n["prefill"] * n["peak"])
    n["answer_ms"] = n["answer"] * n["step_ms"] / n["rows"] + n["prompt_ms"]
    n["tokens_per_s"], n["answers_per_s"] = 1e3 * n["answer"] / n["answer_ms"], 1e3 / n["answer_ms"]
    for name in ("rows", "forest"):
        attention = n[f"{name}_attention"] = 4 * n["num_layers"] * n["queries"] * n[f"{name}_seen"] / 1e9
        n[f"{name}_forward"] = 2 * (n["layers"] + n["lora"]) + attention
        n[f"{name}_backward"] = 2 * n["layers"] + 4 * n["lora"] + 2.5 * attention
    n["head_gflop"] = n["answer"] * 4 * n["head"]
    n["mismatch"] = n["measured"] / n["steps"] * (n["rows_tokens"] * n["rows_forward"] + n["answer"] * 2 * n["head"])
    for name in ("rows", "forest"):
        both_passes = n[f"{name}_tokens"] * (n[f"{name}_forward"] + n[f"{name}_backward"])
        n[f"{name}_gflop"] = both_passes + n["head_gflop"] + n["mismatch"]
    n["kl_gflop"] = n["forest_gflop"] + n["forest_tokens"] * n["forest_forward"] + n["answer"] * 2 * n["head"]
    for name in ("rows", "forest", "kl"):
        n[f"{name}_s"] = n["steps"] * n[f"{name}_gflop"] / (n["train"] * n["peak"]) / 1e3 + n["fixed"]
        n[f"{name}_engines"] = n["steps"] / n[f"{name}_s"] / (n["trained"] * n["answers_per_s"])
    return n


def tables() -> list[str]:
    """Return the computed parts of docs/scale.md, in their order."""
    answers = [f"answers of {answer:,}" for answer in ANSWERS]
    fed = ["tokens/s of an engine", "update, s", "engines of a rank with rows", "with the forest"]
    example = compute(MODELS[0], tokens_of(SHOWN[0], 400), MIDDLE)
    return [
        _table(["assumption", "fewest engines / middle / most", "source"], map(_assumed, ASSUMED.values())),
        _checked(),
        _table(["env", "prompt", "new to an engine", *answers], map(_counted, ENVS)),
        f"```text\n{EXAMPLE.format(model=MODELS[0], env=SHOWN[0], **example)}```",
        _table(["model", "env", "answers", *fed], itertools.starmap(_fed, itertools.product(MODELS, SHOWN, ANSWERS))),
    ]


def _assumed(assumed: dict[str, Any]) -> list[str]:
    values = dict.fromkeys(f"{value:,g}" for value in assumed["values"])  # equal ones are shown once
    return [assumed["text"], " / ".join(values), assumed["source"]]


def _checked() -> str:
    tokens = {"prompt": 217.0, "new_prompt": 217, "answer": 202, "forest_tokens": 419, "rows_seen": 210}
    tokens["forest_seen"] = tokens["rows_seen"]
    speeds = [f"{compute('Qwen/Qwen3-14B', tokens, case)['tokens_per_s']:,.0f}" for case in (FEWEST, MIDDLE, MOST)]
    return (
        "Check: by these assumptions an engine of Qwen3-14B with prompts of 217 tokens and answers of 202 makes\n"
        f"{' / '.join(speeds)} tokens/s. Published: 3,174 (vLLM 0.11.0 on an H100, 1,000 requests at once ³)."
    )


def _counted(env: str) -> list[str]:
    counts = [tokens_of(env, answer) for answer in ANSWERS]
    read = [(n["prompt"] + n["answer"], n["forest_tokens"]) for n in counts]
    ratios = [f"{rows:,.0f} → {forest:,.0f}: {rows / forest:.1f} ×" for rows, forest in read]
    return [env, f"{counts[0]['prompt']:.0f}", f"{counts[0]['new_prompt']:.0f}", *ratios]


def _fed(model: str, env: str, answer: int) -> list[str]:
    fewest, middle, most = (compute(model, tokens_of(env, answer), case) for case in (FEWEST, MIDDLE, MOST))
    fed = [f"{middle[name]:.2g} ({fewest[name]:.2g} – {most[name]:.2g})" for name in ENGINES]
    seconds = f"{middle['rows_s']:.1f} → {middle['forest_s']:.1f}"
    return [model.partition("/")[2], env, f"{answer:,}", f"{middle['tokens_per_s']:,.0f}", seconds, *fed]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
