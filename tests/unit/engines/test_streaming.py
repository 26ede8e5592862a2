"""Growing texts and cancelled requests in the embedded engine."""

from __future__ import annotations

import pytest

from fakes.random_models import make_adapter, make_model
from fakes.remote_engine import engine_spec, request
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.errors import AdapterError
from unstable_lite.transport.messages import Generated, Progress


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    path = make_model(tmp_path_factory.mktemp("model"))
    spec = engine_spec(model=str(path), kind="transformers", max_model_len=256, max_parallel_seq=4)
    engine = TransformersEngine(spec)
    engine.load_adapter(1, make_adapter(path, path / "adapter", 0))
    return engine


def test_streamed_parts_begin_the_text_and_never_the_stop_string(engine: TransformersEngine) -> None:
    for number in range(12):
        engine.add_request(request(number, max_tokens=60, stop=("ab", "e"), is_streamed=number % 2 == 0))
    parts, texts = dict[int, list[str]](), dict[int, str]()
    while engine.has_unfinished():
        for message in engine.step():
            if isinstance(message, Progress):
                assert message.text and message.request_id not in texts
                parts.setdefault(message.request_id, []).append(message.text)
            else:
                assert isinstance(message, Generated)
                texts[message.request_id] = message.generation.text
    assert set(parts) == {0, 2, 4, 6, 8, 10} and len(texts) == 12
    for number, given in parts.items():
        assert texts[number].startswith("".join(given)) and len(texts[number]) - len("".join(given)) < 6
    assert max(map(len, parts.values())) > 5


def test_cancelled_requests_free_slots_and_adapter_and_disturb_no_other(engine: TransformersEngine) -> None:
    engine.add_request(request(0, max_tokens=12))
    (alone,) = [reply for reply in _finish(engine) if isinstance(reply, Generated)]
    for number in range(8):  # four run, four wait
        engine.add_request(request(number, version=int(number > 0), max_tokens=12 if number == 0 else 200))
    for _ in range(3):
        engine.step()
    with pytest.raises(AdapterError, match="unfinished"):
        engine.unload_adapter(1)
    for number in range(1, 9):  # the last one is unknown
        engine.cancel(number)
    (reply,) = [reply for reply in _finish(engine) if isinstance(reply, Generated)]
    assert reply.request_id == 0
    assert reply.generation.completion_ids.tolist() == alone.generation.completion_ids.tolist()
    assert engine._cache.num_free == engine._cache.num_running
    engine.unload_adapter(1)


def _finish(engine: TransformersEngine) -> list[Generated | Progress]:
    messages: list[Generated | Progress] = []
    while engine.has_unfinished():
        messages += engine.step()
    return messages


def test_possible_beginning_of_a_stop_string_is_withheld(engine: TransformersEngine) -> None:
    tokenizer = engine._tokenizer
    watch = tokenizer.watch(("ab", "q"), is_streamed=True)
    assert watch is not None
    given = []
    for token_id in tokenizer.encode("xacab").tolist():
        is_stopped = watch.is_stopped_by(token_id)
        given.append(watch.new_text())
    assert (is_stopped, watch.text) == (True, "xac")
    assert given == ["", "x", "a", "c", ""]
