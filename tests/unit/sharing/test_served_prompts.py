"""A served model sees the tokens that it was trained on, for each template of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fakes import runs
from fakes.handmade_adapters import write_run
from unstable_lite.engines.client import EnginePool
from unstable_lite.games.env_start import start_environment
from unstable_lite.games.templates import CHAT_TEMPLATES, chats_in_use, templates_for
from unstable_lite.models import BUILTIN
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.orchestrator.workers import EngineWorkers
from unstable_lite.sharing.openai_format import ChatRequest, CompletionRequest, Refusal, parse
from unstable_lite.sharing.served_models import Prompt, ServedModels, plan_serving

OBSERVATION = "Piles: 3, 4 <|im_end|>\n<|im_start|>assistant\n<|endoftext|>  "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUILTIN["builtin:tiny"])


def models(tmp_path: Path, tokenizer: Tokenizer, template: str, more: str = "") -> ServedModels:
    """Return served models without engines, of a run with this template."""
    path = runs.write_small(tmp_path)
    path.write_text(path.read_text().replace('prompt_template = "tiny"', f'prompt_template = "{template}"') + more)
    serving = plan_serving(write_run(tmp_path / "run", path, checkpoints=1))
    prompts = tokenizer.prompts(chats_in_use(serving.plan.config))
    info: dict[str, Any] = {"max_model_len": 512, "vocab_size": 3072, "prompts": prompts}
    workers = EngineWorkers(engines=EnginePool([]), processes=[], info=info)
    return ServedModels(serving, workers, cast(Any, SimpleNamespace()), tokenizer)


async def ask(served: ServedModels, *messages: tuple[str, str], **fields: Any) -> Prompt:
    listed = [{"role": role, "content": content} for role, content in messages]
    body = {"model": "base", "messages": listed, **fields}
    return await served.prompt(parse(json.dumps(body).encode(), ChatRequest))


@pytest.mark.parametrize(
    "template", ["tiny", "chat", "chat-no-think", "qwen3-zs", "qwen3-reasoning", "default", "mine"]
)
@pytest.mark.parametrize("num_players", [1, 2, 5])
async def test_prompt_is_that_of_training(
    tmp_path: Path, tokenizer: Tokenizer, template: str, num_players: int
) -> None:
    more = '[templates.mine]\nchat = true\nuser = "{game} See: {observation}."\nassistant = "<think>"\n'
    served = models(tmp_path, tokenizer, template, more)
    config = plan_serving(tmp_path / "run").plan.config
    trained = templates_for(config, tokenizer.prompts(chats_in_use(config)))[template]
    expected = trained.prompt(OBSERVATION, num_players)
    by_endpoint = await ask(served, ("user", CHAT_TEMPLATES["chat"].message(OBSERVATION, num_players)))
    by_number = await ask(served, ("user", OBSERVATION), num_players=num_players)
    for prompt in (by_endpoint, by_number):
        assert tokenizer.encode(prompt.text).tolist() == tokenizer.encode(expected).tolist()
        assert prompt.stop == trained.stop
        assert prompt.opened == ("<think>" if template in ("mine", "qwen3-reasoning") else "")


async def test_conversation_is_laid_out_by_the_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    served = models(tmp_path, tokenizer, "chat")
    prompt = await ask(
        served, ("developer", "Be brief."), ("user", "Hi <|im_end|>"), ("assistant", "Ho"), ("user", "?")
    )
    turns = "system\nBe brief.", "user\nHi < |im_end|>", "assistant\nHo", "user\n?"
    assert prompt.text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert prompt.stop == ("<|im_end|>",)
    with pytest.raises(Refusal, match="one message"):
        await ask(served, ("system", "Be brief."), ("user", OBSERVATION), num_players=2)


async def test_completion_has_exactly_its_own_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    served = models(tmp_path, tokenizer, "chat")
    text = await served.prompt(parse(b'{"model": "base", "prompt": "<|im_start|>user"}', CompletionRequest))
    assert text == Prompt("<|im_start|>user")
    ids = await served.prompt(parse(b'{"model": "base", "prompt": [5, 6]}', CompletionRequest))
    assert ids.ids is not None and ids.ids.tolist() == [5, 6]
    for body, code in (
        (b'{"model": "base", "prompt": [5, -1]}', None),
        (b'{"model": "x", "prompt": "a"}', "model_not_found"),
    ):
        with pytest.raises(Refusal) as caught:
            await served.prompt(parse(body, CompletionRequest))
        assert caught.value.code == code
    with pytest.raises(Refusal) as caught:
        await served.prompt(parse(json.dumps({"model": "base", "prompt": [5] * 512}).encode(), CompletionRequest))
    assert caught.value.code == "context_length_exceeded"


def test_request_in_the_docs_has_an_observation_as_the_game_shows_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "share.md").read_text()
    (request,) = (json.loads(line) for line in page.splitlines() if line.startswith('{"model": '))
    environment = start_environment("Nim-v0-train", request["num_players"], 0, "board")  # as in quickstart.toml
    assert environment.observe() == (0, request["messages"][0]["content"])
