"""vLLM's own OpenAI-compatible server with the builtin model as an opponent in real games."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes.vllm_serving import VLLMServer
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.models import BUILTIN
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import AgentSpec, GameSpec, ModelRef

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    flags = ["--served-model-name", "tiny", "--max-model-len", "1024", "--max-num-seqs", "8"]
    server = VLLMServer(BUILTIN["builtin:tiny"], log, *flags)
    server.start()
    yield f"{server.url}/v1"
    server.kill()


async def test_model_behind_a_vllm_server_plays_real_games(vllm_url: str) -> None:
    async def no_engine(*_: object) -> None:
        raise AssertionError

    models = ("tiny", "scripted:random")
    agents = tuple(
        AgentSpec(
            pid=pid,
            model=ModelRef(uid=f"fixed-{name}", kind="fixed", name=name),
            collect_data=False,
            prompt_template="default",
            action_extraction_fn="default",
        )
        for pid, name in enumerate(models)
    )
    config = OpponentsConfig(base_url=vllm_url, temperature=1.0, max_tokens=16, max_requests=100)
    texts: list[str] = []
    async with PlayerFactory(no_engine, opponents=config) as seats:  # type: ignore[arg-type]
        for seed in range(8):
            spec = GameSpec(
                game_idx=seed,
                kind="eval",
                env_id="TicTacToe-v0-train",
                num_players=2,
                seed=seed,
                agent_specs=agents,
                max_turns=9,
            )
            record = new_record(spec)
            await run_game(record, make_in_process(spec), seats.players(spec), max_action_chars=100)
            assert record.end in ("natural", "invalid")
            texts += [turn.text for turn in record.turns if turn.pid == 0]
        metrics = seats.metrics()
    assert any("\\boxed{" in text for text in texts), texts
    assert metrics["opponents/requests"] == len(texts)
    assert metrics["opponents/failures"] == 0
    assert len(texts) < metrics["opponents/tokens"] / 100, "prompts are more than a hundred tokens long"
