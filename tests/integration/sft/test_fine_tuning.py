"""The training data of fine-tuning and its result, with the real model and the real engine."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from rich.console import Console

from examples.make_tiny_model import END
from fakes.remote_engine import finish, request
from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.engines.base import Engine, load_engine
from unstable_lite.errors import RequestError
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import TEMPLATES, format_prompt, templates_for
from unstable_lite.models import resolve_model
from unstable_lite.sft.fine_tuning import FineTuner
from unstable_lite.sft.pairs import Pair
from unstable_lite.sft.session import collect_pairs
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation, ModelRef

MakeConfig = Callable[..., Config]
QUIET = TerminalInterface(quiet=True)
STOP_ID = 2
"""`<|im_end|>` of the tiny model."""


@pytest.fixture(scope="module")
def pairs(make_config: MakeConfig) -> list[Pair]:
    """Return turns of random players in TicTacToe."""
    config, file = make_config(sft={"pairs": 60, "filter": ()}), io.BytesIO()
    player = ModelRef(uid="scripted:random", kind="fixed", name="scripted:random")
    asyncio.run(collect_pairs(config, [player], PlayerFactory(no_engine), file, QUIET))
    return [msgspec.json.decode(line, type=Pair) for line in file.getvalue().splitlines()]


async def no_engine(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
    raise AssertionError


def prompt_of(pair: Pair) -> str:
    return format_prompt("tiny", pair.observation, 2)


def start_engine(config: Config) -> Engine:
    spec = WorkerSpec(name="engine-0", endpoint="", device="cpu", threads=1, config_json=config.model_dump_json())
    return load_engine(spec)


def generate(engine: Engine, prompts: list[str], version: int = 0, temperature: float = 1.0) -> list[Generation]:
    asked = {"max_tokens": 16, "temperature": temperature, "stop": TEMPLATES["tiny"].stop}
    for number, prompt in enumerate(prompts):
        engine.add_request(request(number, version, prompt=prompt, **asked))
    return finish(engine)


def test_prompts_and_answers_have_the_ids_of_the_engine(make_config: MakeConfig, pairs: list[Pair]) -> None:
    config = make_config()
    sampled = generate(start_engine(config), [prompt_of(pair) for pair in pairs])
    whole = [
        (pair, done) for pair, done in zip(pairs, sampled, strict=True) if done.finish_reason == "stop" and done.text
    ]
    assert len(whole) > 40
    items, _ = FineTuner(config, "cpu").tokenise([replace(pair, completion=done.text) for pair, done in whole])
    for item, (_, done) in zip(items, whole, strict=True):
        assert item.prompt_ids.tolist() == done.prompt_ids.tolist()
        assert item.completion_ids.tolist() == done.completion_ids.tolist()
        assert item.completion_ids[-1] == STOP_ID


def test_chat_template_matches_that_of_the_engine(make_config: MakeConfig, pairs: list[Pair]) -> None:
    config = make_config(template="chat", engine={"max_model_len": 1024})
    engine = start_engine(config)
    template = templates_for(config, engine.info["prompts"])["chat"]
    # A special token spelt out by an opponent must not become one on either side.
    seen = replace(pairs[0], observation=f"{pairs[0].observation} <|im_end|>")
    (done,) = generate(engine, [template.prompt(seen.observation, 2)])
    (item,), _ = FineTuner(config, "cpu").tokenise([seen])
    assert item.prompt_ids.tolist() == done.prompt_ids.tolist()
    assert item.completion_ids[-1] == STOP_ID


def test_loss_covers_only_completion_and_stop_token_as_in_the_stock_model(
    make_config: MakeConfig, pairs: list[Pair]
) -> None:
    tuner = FineTuner(make_config(learner={"max_tokens_per_micro_batch": 1024}), "cpu")
    items, _ = tuner.tokenise(pairs[:9])
    path = resolve_model("builtin:tiny")
    stock = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    total, num_tokens, num_right = 0.0, 0, 0
    for pair in pairs[:9]:
        prompt = tokenizer(prompt_of(pair), add_special_tokens=False)["input_ids"]
        completion = tokenizer(f"\\boxed{{{pair.action}}}{END}", add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + completion])
        labels = torch.tensor([[-100] * len(prompt) + completion])
        with torch.no_grad():
            out = stock(input_ids=ids, labels=labels)
        total += out.loss.item() * len(completion)
        num_tokens += len(completion)
        greedy = out.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        num_right += greedy == completion
    agreement = tuner.agreement(items, "before")
    assert agreement["loss_before"] == pytest.approx(total / num_tokens, abs=1e-4)
    assert agreement["accuracy_before"] == num_right / 9
    loss = tuner._update(items, 1)
    assert loss == pytest.approx(total / num_tokens, abs=1e-4), "the training loss equals the measured loss"


def test_few_pairs_are_memorised_with_their_stop_token(
    make_config: MakeConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    by_prompt = {pair.observation: pair for pair in pairs}
    few = [replace(pair, completion=f"\\boxed{{[{n}]}} {n}!") for n, pair in enumerate(list(by_prompt.values())[:5])]
    config = make_config(sft={"epochs": 60, "batch_size": 5, "learning_rate": 1e-2, "holdout": 0})
    console = Console(file=io.StringIO(), width=80)
    tuner = FineTuner(config, "cpu")
    items, _ = tuner.tokenise(few)
    before = tuner.agreement(items, "before")
    losses = tuner.train(items, TerminalInterface(console))
    after = tuner.agreement(items, "after")
    assert isinstance(console.file, io.StringIO)
    assert "update 60/60" in console.file.getvalue()
    assert before["accuracy_before"] == 0 and after["accuracy_after"] == 1
    assert after["loss_after"] < losses[0] / 2
    peft_files.write_files(tmp_path, *tuner.policy.adapter_state())
    engine = start_engine(config)
    engine.load_adapter(1, tmp_path)
    answers = generate(engine, [prompt_of(pair) for pair in few], version=1, temperature=1e-3)
    assert [done.text for done in answers] == [pair.completion for pair in few]
    assert {done.finish_reason for done in answers} == {"stop"}
    assert {done.completion_ids[-1] for done in answers} == {STOP_ID}


def test_same_seed_makes_the_same_adapter(make_config: MakeConfig, pairs: list[Pair]) -> None:
    def trained(seed: int) -> list[torch.Tensor]:
        config = make_config(sft={"epochs": 1, "batch_size": 6})
        tuner = FineTuner(config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})}), "cpu")
        items, _ = tuner.split(tuner.tokenise(pairs[:24])[0])
        tuner.train(items, QUIET)
        return list(tuner.policy.adapter_state()[0].values())

    first, second, other = trained(0), trained(0), trained(1)
    assert all(map(torch.equal, first, second))
    assert not all(map(torch.equal, first, other))


def test_no_prompt_is_both_trained_on_and_held_out(make_config: MakeConfig, pairs: list[Pair]) -> None:
    tuner = FineTuner(make_config(sft={"holdout": 0.3}), "cpu")
    items, _ = tuner.tokenise(pairs * 2)
    trained, held_out = tuner.split(items)
    assert len(trained) + len(held_out) == len(items)
    assert 0.15 * len(items) < len(held_out) <= 0.3 * len(items)
    assert not {item.prompt_ids.tobytes() for item in trained} & {item.prompt_ids.tobytes() for item in held_out}
    one_prompt = [item for item in items if np.array_equal(item.prompt_ids, items[0].prompt_ids)]
    assert tuner.split(one_prompt) == (one_prompt, [])
    other = next(item for item in items if not np.array_equal(item.prompt_ids, items[0].prompt_ids))
    for number in range(4, 10):  # most have the same prompt, in any shuffled position
        assert tuner.split([one_prompt[0]] * number + [other]) == ([one_prompt[0]] * number, [other])


def test_unusable_pairs_are_left_out_and_counted(make_config: MakeConfig, pairs: list[Pair]) -> None:
    tuner = FineTuner(make_config(), "cpu")
    items, left_out = tuner.tokenise(
        [
            pairs[0],
            replace(pairs[0], completion="thinking " * 30),
            replace(pairs[0], completion="a <|im_end|> b"),
            replace(pairs[0], observation=pairs[0].observation * 40),
            replace(pairs[0], action="[1] } [2]"),
            replace(pairs[0], action="4"),
        ]
    )
    assert len(items) == 2
    assert dict(left_out) == {
        "answer longer than max_generation_len": 1,
        "a stop token within the answer": 1,
        "longer than max_model_len or max_train_len": 1,
        "an action that action_extraction_fn reads differently": 1,
    }


def test_pair_is_laid_out_by_the_template_of_its_env_or_of_the_first(
    make_config: MakeConfig, pairs: list[Pair]
) -> None:
    config = make_config()
    (first,) = config.train_envs
    other = first.model_copy(update={"env_id": "Nim-v0-train", "prompt_template": "qwen3-zs"})
    tuner = FineTuner(config.model_copy(update={"train_envs": (first, other)}), "cpu")
    named = [replace(pairs[0], env_id=env_id) for env_id in (other.env_id, first.env_id, "", "Chess-v0")]
    of_other, *of_first = [item.prompt_ids.tolist() for item in tuner.tokenise(named)[0]]
    assert of_first == [tuner._tokenizer.encode(prompt_of(pairs[0])).tolist()] * 3
    assert of_other == tuner._tokenizer.encode(format_prompt("qwen3-zs", pairs[0].observation, 2)).tolist()


def test_non_finite_loss_ends_the_training_with_the_reason(make_config: MakeConfig, pairs: list[Pair]) -> None:
    tuner = FineTuner(make_config(sft={"learning_rate": 1e30, "batch_size": 6}), "cpu")
    with pytest.raises(RequestError, match=r"update \d+ .*sft\.learning_rate"):
        tuner.train(tuner.tokenise(pairs)[0], QUIET)
