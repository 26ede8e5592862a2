"""The requirements of every engine with a model: one suite for all of them.

Each engine is a real worker process. The reference for log-probabilities is a plain forward pass of transformers and
PEFT in float32 over the reported ids of prompt and completion.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.random_models import make_adapter
from fakes.remote_engine import START_TIMEOUT_S, RemoteEngine
from unstable_lite.adapters.peft_files import WEIGHTS, adapter_digest
from unstable_lite.games.answers import END_OF_THINKING
from unstable_lite.orchestrator.checkpoint_pool import FIRST_RETURNED_VERSION
from unstable_lite.transport.messages import (
    AdapterDigest,
    Cancel,
    ConfirmAdapter,
    Done,
    EngineStats,
    Failed,
    Generate,
    Generated,
    LoadAdapter,
    Message,
    Ready,
)
from unstable_lite.types import Generation

MAX_MODEL_LEN = 640
MAX_LORAS = 4
STOP_ID = 1

KINDS = [
    pytest.param(("transformers", "cpu", "float32"), id="transformers-float32"),
    pytest.param(("transformers", "cpu", "bfloat16"), id="transformers-bfloat16", marks=pytest.mark.nightly),
    pytest.param(("vllm", "cpu", "float32"), id="vllm-float32", marks=pytest.mark.vllm),
    pytest.param(("vllm", "cpu", "bfloat16"), id="vllm-bfloat16", marks=[pytest.mark.vllm, pytest.mark.nightly]),
    pytest.param(
        ("vllm-server", "", "float32"), id="vllm-server-float32", marks=[pytest.mark.vllm, pytest.mark.nightly]
    ),
    pytest.param(("transformers", "cuda:0", "bfloat16"), id="transformers-cuda", marks=pytest.mark.gpu),
    pytest.param(("vllm", "cuda:0", "bfloat16"), id="vllm-cuda", marks=[pytest.mark.gpu, pytest.mark.vllm]),
]


@dataclass(frozen=True)
class Engine:
    """A running engine, and whether its results are exact to float32."""

    remote: RemoteEngine
    is_exact: bool
    info: dict[str, Any]

    def assert_close(self, got: Any, expected: Any) -> None:
        error = np.abs(np.asarray(got) - np.asarray(expected))
        mean_limit, max_limit = (1e-5, 1e-4) if self.is_exact else (0.05, 0.5)
        assert error.mean() < mean_limit and error.max() < max_limit, (error.mean(), error.max())


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    kind, device, dtype = request.param
    server = {}
    if kind == "vllm-server":
        device = request.getfixturevalue("vllm_server").url
        server = {"urls": [device], "adapter_folder": str(tmp_path_factory.mktemp("adapter-folder"))}
    remote = RemoteEngine(
        device,
        model=str(model_dir),
        kind=kind,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_loras=MAX_LORAS,
        max_parallel_seq=16,
        kv_cache_gb=1,
        gpu_memory_utilization=0.2,
        **server,
    )
    try:
        info = remote.wait_for_type(Ready, START_TIMEOUT_S).info
        assert {"kind", "model", "device", "dtype", "threads", "max_model_len", "vocab_size"} <= info.keys()
        assert (info["dtype"], info["max_model_len"]) == ("the server's" if server else dtype, MAX_MODEL_LEN)
        yield Engine(remote, is_exact=dtype == "float32", info=info)
    finally:
        remote.close()


@pytest.fixture
def adapters(engine: Engine, adapter_dirs: list[Path]) -> Iterator[list[int]]:
    versions = [engine.remote.next_version() for _ in adapter_dirs]
    for version, path in zip(versions, adapter_dirs, strict=True):
        assert isinstance(engine.remote.load(version, path), AdapterDigest)
    yield versions
    for version in versions:
        engine.remote.unload(version)


Logits = Callable[[list[int], int], Any]


@pytest.fixture(scope="module")
def reference(model_dir: Path, adapter_dirs: list[Path]) -> Logits:
    """Return a function for the logits after each token but the last; 0 is the base, 1 and 2 are the adapters."""
    import peft
    import torch
    import transformers

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    models = [load(), *(peft.PeftModel.from_pretrained(load(), path) for path in adapter_dirs)]

    @torch.inference_mode()
    def logits(ids: list[int], which: int) -> Any:
        return models[which].eval()(input_ids=torch.tensor([ids[:-1]])).logits[0]

    return logits


def expected_logprobs(
    reference: Logits, generation: Generation, which: int, temperature: float, top_p: float = 1.0
) -> Any:
    import torch

    size = len(generation.prompt_ids)
    ids = [*generation.prompt_ids.tolist(), *generation.completion_ids.tolist()]
    logits = reference(ids, which)[size - 1 :] / temperature
    if top_p < 1:
        probabilities, order = logits.softmax(-1).sort(descending=True)
        is_cut = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(is_cut).scatter(-1, order, is_cut), -torch.inf)
    targets = torch.tensor(ids[size:])
    return logits.log_softmax(-1)[torch.arange(len(targets)), targets].numpy()


def prompts(count: int, size: int = 40) -> list[str]:
    return [f"Player {i}: " + "".join(chr(97 + (i * 7 + j * j) % 26) for j in range(size)) for i in range(count)]


def check(engine: Engine, reference: Logits, which: int, *requests: Generate, temperature: float = 0.7) -> None:
    """Check that the log-probabilities of the answers are the reference's."""
    for generation in engine.remote.generate(*requests):
        engine.assert_close(generation.logprobs, expected_logprobs(reference, generation, which, temperature))


def test_greedy_completion_is_the_most_probable_one(engine: Engine, reference: Logits) -> None:
    remote, asked = engine.remote, prompts(3)
    requests = [remote.request(p, temperature=low, max_tokens=12) for low in (0.0, 1e-6) for p in asked]
    generations = remote.generate(*requests)
    for first, second in zip(generations[:3], generations[3:], strict=True):
        ids = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
        logits = reference(ids, 0)[len(first.prompt_ids) - 1 :].numpy()
        best = logits.max(-1)
        taken = logits[np.arange(len(best)), first.completion_ids]
        assert (best - taken).max() < (1e-4 if engine.is_exact else 0.3)
        if engine.is_exact:
            assert first.completion_ids.tolist() == second.completion_ids.tolist()
    for generation in generations:
        # Log-probabilities are at temperature 1 here, see the docstring of `base.GREEDY_BELOW`.
        engine.assert_close(generation.logprobs, expected_logprobs(reference, generation, 0, 1.0))


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_match_the_reference_for_base_and_adapters_in_one_batch(
    engine: Engine, adapters: list[int], reference: Logits, temperature: float
) -> None:
    remote = engine.remote
    versions = [0, *adapters]
    requests = [
        remote.request(prompt, versions[index % 3], temperature=temperature, max_tokens=20)
        for index, prompt in enumerate(prompts(24))
    ]
    generations = remote.generate(*requests)
    for request, generation in zip(requests, generations, strict=True):
        assert generation.adapter_version == request.adapter_version
        assert len(generation.logprobs) == len(generation.completion_ids) <= 20
    got = np.concatenate([generation.logprobs for generation in generations])
    which = [versions.index(generation.adapter_version) for generation in generations]

    def under(models: list[int]) -> Any:
        rows = zip(generations, models, strict=True)
        return np.concatenate([expected_logprobs(reference, row, model, temperature) for row, model in rows])

    engine.assert_close(got, under(which))
    assert np.abs(got - under([(model + 1) % 3 for model in which])).mean() > 0.2, "the adapters must change the result"


def test_prompts_texts_and_the_end_of_thinking_are_those_of_the_tokenizer(engine: Engine, model_dir: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    (generation,) = engine.remote.generate(engine.remote.request("Zug 🎲: a≤b<|end|>"))
    assert generation.prompt_ids.tolist() == tokenizer("Zug 🎲: a≤b<|end|>")["input_ids"]
    assert generation.prompt_ids.tolist()[-1] == STOP_ID
    for generation in engine.remote.generate(*[engine.remote.request(p, max_tokens=30) for p in prompts(20)]):
        assert generation.text == tokenizer.decode(generation.completion_ids.tolist(), skip_special_tokens=True)
    ids = engine.info["prompts"]["end_of_thinking"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == END_OF_THINKING


def test_given_prompt_ids_are_completed_as_they_are(engine: Engine, reference: Logits) -> None:
    remote = engine.remote
    greedy: dict[str, Any] = {"temperature": 1e-6, "max_tokens": 12}
    whole = [one for one in remote.generate(*[remote.request(p, **greedy) for p in prompts(8)]) if len(one.text) > 8]
    assert whole
    given = [np.concatenate([one.prompt_ids, one.completion_ids[:5]]) for one in whole]
    greedy["max_tokens"] -= 5
    rest = remote.generate(*[remote.request("not this", prompt_ids=ids, **greedy) for ids in given])
    for ids, one, continued in zip(given, whole, rest, strict=True):
        assert continued.prompt_ids.tolist() == ids.tolist()
        if engine.is_exact:
            assert continued.completion_ids.tolist() == one.completion_ids[5:].tolist()
        engine.assert_close(continued.logprobs, expected_logprobs(reference, continued, 0, 1.0))


def test_completion_ends_with_the_stop_token_or_at_its_length(engine: Engine) -> None:
    requests = [engine.remote.request(p, temperature=1.5, max_tokens=40, seed=i) for i, p in enumerate(prompts(60))]
    generations = engine.remote.generate(*requests)
    for generation in generations:
        ids = generation.completion_ids.tolist()
        assert STOP_ID not in ids[:-1]
        assert (ids[-1] == STOP_ID) == (generation.finish_reason == "stop")
        assert generation.finish_reason == "stop" or len(ids) == 40
    assert {generation.finish_reason for generation in generations} == {"stop", "length"}


def test_stop_string_ends_a_completion_and_is_cut_from_its_text(engine: Engine) -> None:
    remote = engine.remote
    free = remote.generate(*[remote.request(p, max_tokens=30, temperature=1e-6) for p in prompts(8)])
    num_checked = 0
    for prompt, generation in zip(prompts(8), free, strict=True):
        text = generation.text
        pairs = [i for i in range(2, len(text) - 1) if text[i : i + 2].isascii() and text[i : i + 2].isprintable()]
        if not pairs or not engine.is_exact:
            continue
        stop = text[pairs[0] : pairs[0] + 2]
        at = text.index(stop)
        (stopped,) = remote.generate(remote.request(prompt, max_tokens=30, temperature=1e-6, stop=("never met", stop)))
        assert (stopped.finish_reason, stopped.text) == ("stop", text[:at])
        size = len(stopped.completion_ids)
        assert stopped.completion_ids.tolist() == generation.completion_ids.tolist()[:size]
        assert bytes(text[: at + 2], "utf-8")[-2:] == stop.encode() and len(stopped.logprobs) == size
        num_checked += 1
    assert num_checked or not engine.is_exact


def _is_reply(message: Message, request_id: int) -> bool:
    return isinstance(message, Generated | Failed) and message.request_id == request_id


def test_busy_engine_reports_its_stats_and_cancelled_requests_free_their_adapter(
    engine: Engine, adapter_dirs: list[Path]
) -> None:
    remote, version = engine.remote, engine.remote.next_version()
    if engine.info["kind"] == "vllm-server":
        return  # it finishes them
    assert isinstance(remote.load(version, adapter_dirs[0]), AdapterDigest)
    (alone,) = remote.generate(remote.request("b", max_tokens=20, seed=3))
    remote.inbox.clear()  # statistics of earlier tests
    asked = [remote.request(f"{number} of many", version, max_tokens=600, temperature=2.0) for number in range(200)]
    remote.send(*asked)
    stats = remote.wait_for(lambda said: isinstance(said, EngineStats) and said.queued > 0 and said.tokens_per_s > 0)
    assert isinstance(stats, EngineStats) and 0 < stats.running <= 16 and 0 <= stats.cached_share <= 1
    other = remote.request("b", max_tokens=20, seed=3)
    remote.send(other)
    remote.send(*[Cancel(request_id=request.request_id) for request in asked])
    reply = remote.wait_for(lambda message: _is_reply(message, other.request_id))
    assert isinstance(reply, Generated)
    assert reply.generation.completion_ids.tolist() == alone.completion_ids.tolist() or not engine.is_exact
    assert isinstance(remote.unload(version), Done)
    assert remote.generate(remote.request("b", max_tokens=20))


def test_special_token_as_stop_string_is_kept_as_last_token(engine: Engine) -> None:
    pad_id, remote = 0, engine.remote
    drawn = {"temperature": 1.5, "max_tokens": 40, "stop": ("<|pad|>", "never met")}
    requests = [remote.request(p, **drawn, seed=i) for i, p in enumerate(prompts(80))]
    generations = remote.generate(*requests)
    ended = [g for g in generations if g.completion_ids[-1] == pad_id]
    assert ended and all(g.finish_reason == "stop" and "<|pad|>" not in g.text for g in ended)
    assert all(pad_id not in g.completion_ids[:-1] for g in generations)


def test_prompt_without_room_is_refused_and_a_completion_ends_at_the_end_of_the_context(engine: Engine) -> None:
    remote = engine.remote
    fits, too_long = remote.request("x" * (MAX_MODEL_LEN - 1)), remote.request("x" * MAX_MODEL_LEN)
    served, refused = remote.ask(fits, too_long)
    assert isinstance(refused, Failed) and refused.reason == "prompt_too_long"
    assert str(MAX_MODEL_LEN) in refused.error and str(MAX_MODEL_LEN - 1) in refused.error
    assert len(served.generation.completion_ids) == 1
    (generation,) = engine.remote.generate(engine.remote.request("y" * (MAX_MODEL_LEN - 5), max_tokens=200))
    ids = generation.completion_ids.tolist()
    assert (len(ids), generation.finish_reason) == (5, "length") or ids[-1] == STOP_ID


def test_unknown_adapter_is_an_error_and_never_the_base(engine: Engine) -> None:
    (reply,) = engine.remote.ask(engine.remote.request("hello", version=991))
    assert isinstance(reply, Failed) and reply.reason == "engine_failed"
    assert "991" in reply.error and "loaded" in reply.error


def test_adapter_version_is_never_reused(engine: Engine, adapter_dirs: list[Path]) -> None:
    remote, version = engine.remote, engine.remote.next_version()
    assert isinstance(remote.load(version, adapter_dirs[0]), AdapterDigest)
    again = remote.load(version, adapter_dirs[1])
    assert isinstance(again, Failed) and "already" in again.error
    assert isinstance(remote.unload(version), Done)
    for reply in (
        remote.load(version, adapter_dirs[0]),
        remote.unload(version),
        *remote.ask(remote.request("a", version)),
    ):
        assert isinstance(reply, Failed) and str(version) in reply.error
    assert isinstance(remote.load(0, adapter_dirs[0]), Failed)


def test_engine_reports_the_digest_of_the_adapter_that_it_holds(
    engine: Engine, adapter_dirs: list[Path], tmp_path: Path
) -> None:
    remote, damaged = engine.remote, tmp_path / "damaged"
    shutil.copytree(adapter_dirs[0], damaged)
    content = bytearray((damaged / WEIGHTS).read_bytes())
    content[-4] ^= 1
    (damaged / WEIGHTS).write_bytes(content)
    digests = []
    for path in (*adapter_dirs, damaged):
        version = remote.next_version()
        read = remote.load(version, path)
        assert isinstance(read, AdapterDigest) and read.digest == adapter_digest(path)
        (held,) = remote.ask(ConfirmAdapter(request_id=next(remote._ids), version=version))
        assert held.digest == read.digest
        digests.append(read.digest)
        assert isinstance(remote.unload(version), Done)
    assert len(set(digests)) == 3
    (unknown,) = remote.ask(ConfirmAdapter(request_id=next(remote._ids), version=version))
    assert isinstance(unknown, Failed) and str(version) in unknown.error


def test_version_in_use_is_not_unloaded(engine: Engine, adapters: list[int]) -> None:
    remote = engine.remote
    request, unload = remote.request("b", adapters[0], max_tokens=50), remote.unloading(adapters[0])
    generated, refused = remote.ask(request, unload)
    assert isinstance(refused, Failed) and "unfinished" in refused.error
    assert generated.generation.adapter_version == adapters[0]


def test_adapter_is_loaded_while_requests_are_in_flight(
    engine: Engine, adapters: list[int], adapter_dirs: list[Path]
) -> None:
    remote = engine.remote
    requests = [remote.request(prompt, adapters[0], max_tokens=60) for prompt in prompts(12)]
    version = remote.next_version()
    load = LoadAdapter(request_id=next(remote._ids), version=version, path=str(adapter_dirs[1]))
    *answers, read = remote.ask(*requests, load)
    assert isinstance(read, AdapterDigest)
    assert [len(answer.generation.completion_ids) > 0 for answer in answers] == [True] * len(requests)
    assert {answer.generation.adapter_version for answer in answers} == {adapters[0]}
    assert isinstance(remote.unload(version), Done)


def test_no_more_adapters_are_loaded_than_slots(engine: Engine, adapter_dirs: list[Path]) -> None:
    remote = engine.remote
    versions = [remote.next_version() for _ in range(MAX_LORAS + 1)]
    replies = [remote.load(version, adapter_dirs[0]) for version in versions]
    assert [type(reply) for reply in replies] == [AdapterDigest] * MAX_LORAS + [Failed]
    assert "max_loras" in replies[-1].error
    generations = remote.generate(*[remote.request("all at once", version, seed=5) for version in versions[:-1]])
    assert len({tuple(generation.completion_ids) for generation in generations}) == 1 or not engine.is_exact
    for version in versions[:-1]:
        assert isinstance(remote.unload(version), Done)


def test_versions_of_returning_adapters_are_served(
    engine: Engine, adapters: list[int], adapter_dirs: list[Path]
) -> None:
    remote, version = engine.remote, FIRST_RETURNED_VERSION + 5
    assert isinstance(remote.load(version, adapter_dirs[0]), AdapterDigest)
    returned, first, other, base = remote.generate(
        *(remote.request("who", v, temperature=1e-6) for v in (version, *adapters, 0))
    )
    assert returned.adapter_version == version
    if engine.is_exact:  # otherwise rounding may make them diverge
        assert returned.completion_ids.tolist() == first.completion_ids.tolist()
    engine.assert_close(returned.logprobs[:1], first.logprobs[:1])
    # With every slot taken, rows without an adapter still get the base.
    assert first.completion_ids.tolist() not in (other.completion_ids.tolist(), base.completion_ids.tolist())
    assert isinstance(remote.unload(version), Done)


def test_adapter_that_does_not_fit_the_base_is_refused(
    engine: Engine, model_dir: Path, adapter_dirs: list[Path], tmp_path: Path
) -> None:
    remote = engine.remote
    dora = shutil.copytree(adapter_dirs[0], tmp_path / "dora")
    config = json.loads((dora / "adapter_config.json").read_text()) | {"use_dora": True}
    (dora / "adapter_config.json").write_text(json.dumps(config))
    wrong_name, wrong_shape = (tmp_path / "name", tmp_path / "shape")
    _rewrite(adapter_dirs[0], wrong_name, lambda key, tensor: (key.replace("layers.1", "layers.7"), tensor))
    _rewrite(
        adapter_dirs[0],
        wrong_shape,
        lambda key, tensor: (key, tensor[:, 1:].contiguous() if "lora_A" in key else tensor),
    )
    not_finite = tmp_path / "nan"
    _rewrite(adapter_dirs[0], not_finite, lambda key, tensor: (key, tensor / 0))
    reasons = {
        tmp_path / "nowhere": "adapter_model.safetensors",
        dora: "use_dora",
        wrong_name: "layers.7",
        wrong_shape: "fit",
        not_finite: "not finite",
        make_adapter(model_dir, tmp_path / "rank", 3, r=32): "rank 32",
    }
    for path, reason in reasons.items():
        reply = remote.load(remote.next_version(), path)
        assert isinstance(reply, Failed) and reason in reply.error, (reason, reply)
    assert len(remote.generate(remote.request("still serving"))) == 1


def _rewrite(source: Path, target: Path, change: Callable[[str, Any], tuple[str, Any]]) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    file = target / "adapter_model.safetensors"
    save_file(dict(change(key, tensor) for key, tensor in load_file(file).items()), file)


def test_same_seed_draws_the_same_tokens_in_any_batch(engine: Engine, adapters: list[int]) -> None:
    remote = engine.remote
    alone = [
        remote.generate(remote.request(p, adapters[0], seed=i, max_tokens=16))[0] for i, p in enumerate(prompts(3))
    ]
    crowd = [remote.request(prompt, version, max_tokens=11) for prompt in prompts(8) for version in (0, adapters[1])]
    again = [remote.request(prompt, adapters[0], seed=i, max_tokens=16) for i, prompt in enumerate(prompts(3))]
    together = remote.generate(*crowd[:9], *again, *crowd[9:])[9:12]
    if engine.is_exact:  # in bfloat16 the rest of the batch changes the last bits of the logits
        for first, second in zip(alone, together, strict=True):
            assert first.completion_ids.tolist() == second.completion_ids.tolist()
    others = remote.generate(*[remote.request(prompts(1)[0], adapters[0], seed=i, max_tokens=16) for i in range(20)])
    assert len({tuple(other.completion_ids) for other in others}) > 15


def test_top_p_draws_from_the_nucleus_and_reports_its_logprobs(engine: Engine, reference: Logits) -> None:
    requests = [engine.remote.request(prompt, temperature=1.0, top_p=0.6, max_tokens=12) for prompt in prompts(20)]
    generations = engine.remote.generate(*requests)
    got = np.concatenate([generation.logprobs for generation in generations])
    expected = np.concatenate([expected_logprobs(reference, row, 0, 1.0, 0.6) for row in generations])
    if engine.is_exact:
        engine.assert_close(got, expected)
    else:  # rounding moves the boundary of the nucleus
        assert (np.abs(got - expected) > 0.5).mean() < 0.1


def test_sampling_follows_the_softmax(engine: Engine, reference: Logits) -> None:
    remote, count, temperature = engine.remote, 3000, 0.8
    requests = [remote.request("distribution", temperature=temperature, max_tokens=1) for _ in range(count)]
    generations = remote.generate(*requests)
    ids = [*generations[0].prompt_ids.tolist(), 0]
    expected = (reference(ids, 0)[-1] / temperature).softmax(-1).numpy() * count
    drawn = np.bincount([generation.completion_ids[0] for generation in generations], minlength=len(expected))
    is_common = expected >= 8
    rest = drawn[~is_common].sum() - expected[~is_common].sum()
    chi2 = ((drawn - expected)[is_common] ** 2 / expected[is_common]).sum() + rest**2 / expected[~is_common].sum()
    degrees = is_common.sum()
    assert degrees > 20
    # Five standard deviations of χ²; bfloat16 makes the distribution differ by a few per cent.
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5 + (0 if engine.is_exact else 60)


def test_prefix_computed_by_one_version_never_serves_another(
    engine: Engine, adapters: list[int], reference: Logits
) -> None:
    versions = [0, *adapters]
    for which in (0, 1, 0, 2, 1, 2):
        check(engine, reference, which, engine.remote.request("shared beginnings " * 9, versions[which], max_tokens=10))


def test_growing_and_branching_games_match_the_reference(
    engine: Engine, adapters: list[int], reference: Logits
) -> None:
    """Exercise the prefix cache: later turns of a game, twins in one frame, and branches of a common beginning."""
    remote = engine.remote
    rules = "The rules: " + "take one, two or three; " * 12
    for turn in range(4):
        history = rules + "".join(f"[move {move}] " for move in range(turn))
        tails = ["", "", "a", "ab", "b", "zz" * turn]
        check(engine, reference, 1, *(remote.request(history + tail, adapters[0], max_tokens=6) for tail in tails))


def test_prompts_longer_than_a_step_are_served(engine: Engine, reference: Logits) -> None:
    requests = [engine.remote.request(letter * 600 + "!", max_tokens=5) for letter in "abcdefgh"]
    check(engine, reference, 0, *requests)
