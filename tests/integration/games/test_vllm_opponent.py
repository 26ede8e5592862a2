"""vLLM's own OpenAI-compatible server with the builtin model as an opponent in real games."""

from collections.abc import Iterator

import pytest

from fakes.group_games import endpoint_games
from fakes.vllm_serving import VLLMServer
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.models import BUILTIN

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
    config = OpponentsConfig(base_url=vllm_url, temperature=1.0, max_tokens=16, max_requests=100)
    records, metrics = await endpoint_games(config, "tiny", "default", 8)
    texts = [turn.text for record in records for turn in record.turns if turn.pid == 0]
    assert any("\\boxed{" in text for text in texts), texts
    assert metrics["opponents/requests"] == len(texts)
    assert metrics["opponents/failures"] == 0
    assert len(texts) < metrics["opponents/tokens"] / 100, "prompts are more than a hundred tokens long"
