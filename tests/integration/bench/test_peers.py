"""The peers play the same games as this project; their files state the differences."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from bench import models
from bench.harness import bench_config, letters
from bench.peers import padded_update, reference_update
from bench.peers.blocking import play
from bench.peers.ticking_engine import in_a_process
from fakes.game_records import BASE, make_generation, make_item, make_spec
from unstable_lite.config import Config
from unstable_lite.errors import RequestError
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.players.policy import PolicyPlayer
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.learner.batching import fit
from unstable_lite.learner.model import Policy
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameRecord, GameSpec, Generation


def answers() -> list[str]:
    return [f"\\boxed{{[{cell}]}}" for cell in (4, 0, 8, 2, 6, 1, 7, 3, 5)]


def played_by_ours(spec: GameSpec) -> GameRecord:
    texts = iter(answers())

    async def generate(*_: object) -> Generation:
        return make_generation([], text=next(texts))

    record = new_record(spec)
    players = {
        agent.pid: PolicyPlayer(generate, TEMPLATES["tiny"], agent, spec.num_players) for agent in spec.agent_specs
    }
    asyncio.run(run_game(record, make_in_process(spec), players))
    return record


def test_blocking_game_gives_the_same_record_as_ours() -> None:
    spec, texts = make_spec(BASE, BASE, env_id="TicTacToe-v0-train", seed=4, max_turns=20), iter(answers())
    record = play(spec, lambda *_: next(texts))
    ours = played_by_ours(spec)
    assert record.turns == ours.turns and len(record.turns) >= 5
    assert (record.rewards, record.outcomes, record.end) == (ours.rewards, ours.outcomes, ours.end)
    steps = [(step.obs, step.act, step.format_feedback) for t in record.trajectories for step in t.steps]
    assert steps == [(step.obs, step.act, step.format_feedback) for t in ours.trajectories for step in t.steps]


def scripted() -> Config:
    return bench_config(engine={"kind": "scripted", "replies": ("\\boxed{[4]}",)})


def test_ticking_engine_in_a_process_loads_and_drops_adapters(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with in_a_process(scripted(), threads=1, tick_s=0.001) as engine:
        engine.go_on()
        engine.load_adapter(1, str(tmp_path), set())
        assert engine.submit_prompt("a prompt", 1, ()) == "\\boxed{[4]}"
        engine.load_adapter(2, str(tmp_path), {1})
        assert engine.submit_prompt("a prompt", 1, ()) == "\\boxed{[4]}"
        engine.load_adapter(3, str(tmp_path), {2})
        with pytest.raises(RequestError, match="version 1"):
            engine.submit_prompt("a prompt", 1, ())


def make_model(directory: Path) -> Config:
    """Make a model with an adapter that changes its output, and a config whose steps change nothing."""
    models.make_tiny(directory / "model", seed=0)
    settings = {
        "model_name": str(directory / "model"),
        "engine": {"temperature": 1.0, "max_generation_len": 64},
        "learner": {"learning_rate": 1e-30, "weight_decay": 0.0, "dtype": "float32"},
    }
    models.make_adapters(bench_config(**settings), directory, [1], seed=0)
    return bench_config(**settings, lora={"initial_lora_path": str(directory / "v1")})


def test_peers_updates_have_the_same_gradient_as_ours(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config, rng = make_model(tmp_path), random.Random(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = REINFORCELearner(config, "cpu")
    items, steps = [], []
    for index in range(padded_update.ROWS + 3):
        prompt, completion = letters(rng, rng.randint(20, 40)), letters(rng, rng.randint(4, 9))
        prompt_ids, completion_ids = (tokenizer(text)["input_ids"] for text in (prompt, completion))
        item = make_item(prompt_ids, completion_ids, reward=rng.choice((-1.0, 0.5, 1.0)), trajectory=index)
        items.append(replace(item, logprobs=ours.policy.score([item])[0].adapter))
        steps.append(reference_update.TextStep(prompt=prompt, completion=completion, advantage=item.reward))
    policy = Policy(config, "cpu")
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-30)
    settings = {"divisor": fit(items, None).mean_completion_len, "gradient_clipping": 0.2}
    padded = padded_update.update(policy, items, optimizer, **settings)
    policy.model.eval()
    reference = reference_update.update(policy, tokenizer, steps, optimizer, **settings)
    norm = ours.update(items, version=1).metrics["policy_grad_norm"]
    assert norm > 0
    assert (padded, reference) == pytest.approx((norm, norm), rel=1e-3)
