"""The embedded model is small, loads anywhere, encodes any text and knows the rules of its games."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import make_tiny_model as make
from fakes.openspiel_games import LISTED, random_observations
from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec
from unstable_lite.evaluation.probing import probe, random_positions
from unstable_lite.evaluation.scoring import action_distribution
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.lookahead import greedy_actions, optimal_actions
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.models import resolve_model

WEIGHTS = Path(resolve_model("builtin:tiny"))
FAMILIES = {
    "TicTacToe-v0-train": 64,
    "ConnectFour-v0-train": 100,
    "SimpleTak-v0-train": 90,
    "Nim-v0-train": 56,
    "KuhnPoker-v0-train": 70,
    "LiarsDice-v0-small-train": 130,
    "IteratedRockPaperScissors-v0-train": 50,
    "PigDice-v0-train": 48,
}
"""Largest mean number of tokens of a prompt in random games, by env id."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)


def test_model_is_a_small_stock_qwen3_that_stops_at_the_end_of_a_turn(model: Any, tokenizer: Any) -> None:
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert model.config.head_dim in (32, 64)
    names = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert {path.name for path in WEIGHTS.iterdir()} >= set(names.split())
    with safe_open(WEIGHTS / "model.safetensors", "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id


@settings(deadline=None, max_examples=100)
@given(st.text())
def test_any_text_survives_encoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_whole_transcripts_survive_encoding(tokenizer: Any) -> None:
    for env_id in FAMILIES:
        for observation, action in random_turns(env_id.removesuffix("-train"), games=2):
            text = f"{make.tiny_prompt(observation)}\\boxed{{{action}}}<|im_end|>"
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_chat_template_equals_the_template_named_tiny(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Your move."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == make.tiny_prompt("Your move.")
    assert text == "<|im_start|>user\nYour move.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("model_name", "env_id", "most_tokens"),
    [
        *(("builtin:tiny", env_id, most) for env_id, most in FAMILIES.items()),
        *(("builtin:tiny-games", env_id, 120) for env_id in LISTED),
    ],
)
def test_answers_in_every_listed_game_are_legal_and_turns_cost_few_tokens(
    model_name: str, env_id: str, most_tokens: int
) -> None:
    """Mean probability of a legal answer, as `probe` computes it; and few tokens, so that an update takes a second."""
    is_openspiel = env_id in LISTED
    seen = random_observations(env_id, 12, 7) if is_openspiel else [one for one, _ in random_turns(env_id, games=20)]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model_name))
    lengths = [len(tokenizer.encode(make.tiny_prompt(observation))) for observation in seen]
    assert sum(lengths) / len(lengths) <= most_tokens
    train = TrainEnvSpec(env_id=env_id, num_players=2, num_actors=2, prompt_template="tiny")
    config = Config(model_name=model_name, train_envs=(train,))
    asked = random.Random(1).sample(sorted(set(seen)), min(60, len(set(seen))))
    found = action_distribution("base", env_id, asked, config=config, device="cpu")
    assert sum(1 - distribution.rest for distribution in found) / len(found) >= 0.95
    answers = {action for distribution in found for action in distribution.actions}
    assert is_openspiel or max(len(tokenizer.encode(f"\\boxed{{{one}}}<|im_end|>")) for one in answers) <= 6


@pytest.mark.parametrize("env_id", ["Nim-v0-train", "TicTacToe-v0-train", "ConnectFour-v0-train", "LiarsDice-v0-train"])
def test_teacher_slightly_prefers_strong_moves(env_id: str) -> None:
    share = make.STRONG_SHARES.get(env_id.partition("-v0")[0], 0.0)
    read = {"ConnectFour": greedy_actions, "LiarsDice": lambda *_: []}.get(env_id.partition("-v0")[0], optimal_actions)
    are_unequal = set()
    for observation, _ in random_turns(env_id, games=5):
        legal, best = legal_actions(env_id, observation), read(env_id, observation)
        expected = {
            action: (1 - share) / len(legal) + (share / len(best) if action in best else 0.0)
            if best
            else 1 / len(legal)
            for action in legal
        }
        assert make.action_probabilities(env_id, observation) == pytest.approx(expected)
        are_unequal.add(max(expected.values()) > 1.01 * min(expected.values()))
    assert (True in are_unequal) == (share > 0)


def test_turn_is_trained_on_the_whole_next_token_distribution() -> None:
    turn = make.EncodedTurn([1], [(5, 7), (5, 8), (6, 7)], (0.5, 0.3, 0.2), chosen=1)
    first, second = turn.next_tokens()
    assert first == pytest.approx({5: 0.8, 6: 0.2})
    assert second == pytest.approx({7: 0.625, 8: 0.375})


@pytest.mark.parametrize(("env_id", "least"), [("Nim-v0-train", 0.25), ("TicTacToe-v0-train", 0.35)])
def test_base_plays_slightly_better_than_random(env_id: str, least: float) -> None:
    """Mean probability of a best move if some legal move is worse; random play has .20 in Nim and .33 in TicTacToe."""
    env = EvalEnvSpec(env_id=env_id, num_players=2, prompt_template="tiny", observation="board")
    observations = sorted({position.observation for position in random_positions(env, games=30)})
    config = Config(model_name="builtin:tiny", train_envs=(TrainEnvSpec(env_id=env_id, num_players=2, num_actors=1),))
    found = action_distribution("base", env_id, observations, config=config, prompt_template="tiny")
    at = dict(zip(observations, found, strict=True))
    optimal = probe("base", env, random_positions(env, games=30), at).optimal
    assert least < optimal.value < least + 0.2


@pytest.mark.parametrize("model_name", ["builtin:tiny", "builtin:tiny-games"])
def test_built_in_model_is_small_and_survives_any_text(model_name: str) -> None:
    path = Path(resolve_model(model_name))
    assert sum(file.stat().st_size for file in path.iterdir()) <= 8 * 2**20
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "Zoë said: “42”\n\t[bet] \\boxed{[Bid: 1, 2]}"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.nightly
def test_recipe_runs_and_its_tokenizer_depends_only_on_the_seed(tmp_path: Path) -> None:
    for run, seed in (("a", 3), ("b", 3), ("c", 4)):
        make.make(tmp_path / run, games=50, steps=5, seed=seed)
    tokenizers = [(tmp_path / run / "tokenizer.json").read_bytes() for run in "abc"]
    assert tokenizers[0] == tokenizers[1]
    assert tokenizers[0] != tokenizers[2]
    remade = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    again = AutoTokenizer.from_pretrained(tmp_path / "a")
    ids = again(make.tiny_prompt("Your move."), return_tensors="pt")["input_ids"]
    assert remade(ids).logits.shape[-1] == remade.config.vocab_size >= len(again)


def random_turns(env_id: str, games: int) -> list[tuple[str, str]]:
    """Return (observation, action) pairs of random-legal games."""
    rng = random.Random(0)
    turns = []
    for _ in range(games):
        env = Environment(env_id, num_players=2, seed=rng.getrandbits(31))
        done = False
        while not done:
            _, observation = env.observe()
            action = rng.choice(legal_actions(env_id, observation))
            turns.append((observation, action))
            done = env.step(action)
    return turns
