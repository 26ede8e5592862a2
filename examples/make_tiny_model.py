"""Make an embedded model: `python examples/make_tiny_model.py --output DIR [--model tiny-games]`.

Owns the recipe of the tokenizer and the model: games of mixed strength → turns → byte-level BPE → a Qwen3 of
about a million parameters that imitates them. A move in these games is a strong one with a small probability
(`STRONG_SHARES`), otherwise any legal one, because real language models have read games of players of every strength:
the model stands for a base model that knows rules and format and plays a little better than at random.

The distribution of the player's next token is known exactly, so the model is trained on it, not on one draw from it:
every turn then shows which moves are legal and which are strong.

There are two: `tiny` plays games of TextArena, `tiny-games` those of OpenSpiel, all of them at random.

Promises neither language nor good play: text outside the games below comes out as noise. Games, tokenizer and
the order of batches depend only on the seed; the weights do, too, as far as PyTorch's kernels do with this number of
threads on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from unstable_lite.config.games import EnvSpec
from unstable_lite.games.env_catalogue import BOARD_GAMES
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.lookahead import GREEDY_GAMES, OPTIMAL_ACTIONS, greedy_actions, optimal_actions
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.types import Observation

TEXTARENA = {
    "TicTacToe-v0-train": 0.20,
    "ConnectFour-v0-train": 0.20,
    "SimpleTak-v0-train": 0.14,
    "SimpleTak-v0-medium-train": 0.02,
    "Nim-v0-train": 0.18,
    "Nim-v0-medium-train": 0.02,
    "Nim-v0-large-train": 0.01,
    "KuhnPoker-v0-train": 0.05,
    "KuhnPoker-v0-short-train": 0.01,
    "LiarsDice-v0-small-train": 0.09,
    "LiarsDice-v0-train": 0.015,
    "IteratedRockPaperScissors-v0-train": 0.02,
    "PigDice-v0-train": 0.015,
    "PigDice-v0-short-train": 0.03,
}
OPENSPIEL = {
    "openspiel:kuhn_poker": 0.06,
    "openspiel:leduc_poker": 0.12,
    "openspiel:liars_dice": 0.06,
    "openspiel:liars_dice(dice_sides=3)": 0.06,
    "openspiel:goofspiel(imp_info=True,num_cards=4,points_order=descending)": 0.05,
    "openspiel:goofspiel(imp_info=True)": 0.05,
    "openspiel:goofspiel": 0.05,
    "openspiel:matrix_rps": 0.03,
    "openspiel:matrix_brps": 0.03,
    "openspiel:matrix_mp": 0.03,
    "openspiel:nim": 0.08,
    "openspiel:nim(is_misere=False,pile_sizes=3;4;5)": 0.10,
    "openspiel:tic_tac_toe": 0.12,
    "openspiel:connect_four": 0.12,
    "openspiel:pig": 0.04,
}
GAME_SHARES = {"tiny": TEXTARENA, "tiny-games": OPENSPIEL}
"""Share of each env in a model's games."""

STRONG_SHARES = {"TicTacToe": 0.2, "Nim": 0.2, "KuhnPoker": 0.2, "SimpleTak": 0.15, "ConnectFour": 0.07}
"""Probability of a strong move by env family: an optimal one if the optimum is known, otherwise one of the player that
looks one move ahead."""

TURNS_PER_GAME = 12
"""Maximum of turns kept per game, half of them the last ones: only late in a game are some moves illegal."""

OTHER_ENVS = (
    "2048-v0",
    "Battleship-v0",
    "Blackjack-v0",
    "Breakthrough-v0-tiny",
    "Chopsticks-v0",
    "ColonelBlotto-v0-small",
    "FrozenLake-v0-random",
    "GameOfPureStrategy-v0",
    "GuessTheNumber-v0",
    "HighSociety-v0",
    "IndianPoker-v0-short",
    "IteratedMatchingPennies-v0",
    "IteratedPrisonersDilemma-v0",
    "Mastermind-v0",
    "MemoryGame-v0",
    "Minesweeper-v0-small",
    "Othello-v0-tiny",
    "Secretary-v0",
    "SimpleNegotiation-v0-short",
    "Snake-v0",
    "TowerOfHanoi-v0",
)
"""Envs whose first observations the tokenizer also sees, so that the rest of its vocabulary is English."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Every token of a prompt costs time in every turn that is played and again in every turn that is trained. So merges may
# cross words (a game's rules become a handful of tokens), and only the state of a game is kept separate.
PRE_TOKENS = "|".join(
    (
        r"'?\[\d{1,2}\]'?(?:, |$)",  # an item of a list of moves
        r" (?:\d{1,2}|[XO]) {1,2}(?:\||\n[-+]+\n|\n\n)",  # a cell of TicTacToe or SimpleTak
        r"(?:[.XO] ){2,3}",  # two or three cells of ConnectFour
        r"\d{1,2}(?: \d{1,2}){3,}",  # the numbers above its columns
        r"\n  pile \d{1,2}: \d{1,2}",  # a pile of Nim
        r"\tPlayer \d{1,2}: \d{1,2}(?:; )?",  # how many dice a player has
        r"\d{1,2} of face \d",  # a bid of LiarsDice
        r"\.?\n ?(?:\[GAME\] )?Player \d[^\n\d\[\]':]*",  # the head of an event's line
        r"(?<!Player )\d{1,2}(?:, )?",  # any other number
    )
)
PRE_TOKENS_OPENSPIEL = "|".join(
    (
        r"\[[^\]\n]{1,16}\](?: |$)",  # an item of the list of moves
        r"\n(?:Board|Legal actions|Bets|Piles|Your card|Public card|Round \d|Chips paid|Your dice|Prize|Scores):",
        r"(?:[.xo\d]+ ?){1,3}(?=[.xo\d \n])",  # cells of a board
        r"pile \d has \d{1,2}(?:, )?",
        r"(?:check|call|bet|fold|raise)(?:, )?",
        r"[JQK](?: of \w+)?",
        r"bid \d{1,2} of face \d(?:, )?",
        r"(?<!Player )-?\d{1,3}(?:, )?",  # any other number
    )
)
VOCAB_SIZE = 3072
MAX_TOKEN_LENGTH = 600
MAX_TURN_TOKENS = 512

OBSERVATION_SHARE = 0.15
"""Share of the observation's tokens that are predicted, too, which teaches the board's layout."""
OBSERVATION_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a player of mixed strength: its prompt, the possible moves, their probabilities, and its choice."""

    prompt: str
    completions: tuple[str, ...]
    probabilities: tuple[float, ...]
    chosen: int


def tiny_prompt(observation: str) -> str:
    """Return the prompt of the template `tiny`."""
    return f"{START}user\n{observation}{END}\n{START}assistant\n"


def action_probabilities(env_id: str, observation: str) -> dict[str, float]:
    """Return each legal action of the player of mixed strength with its probability."""
    family = env_id.partition("-v0")[0]
    legal = legal_actions(env_id, observation)
    strong: list[str] = []
    if family in OPTIMAL_ACTIONS:
        strong = optimal_actions(env_id, observation)
    elif family in GREEDY_GAMES:
        strong = greedy_actions(env_id, observation)
    share = STRONG_SHARES[family] if strong else 0.0
    return {action: (1 - share) / len(legal) + (share / len(strong) if action in strong else 0.0) for action in legal}


def play_games(num_games: int, rng: random.Random, shares: Mapping[str, float] = TEXTARENA) -> list[Turn]:
    """Play games of mixed strength; return their turns in random order.

    In every second game of those with a board, a player sees the rules and the newest board only.
    """
    turns: list[Turn] = []
    for env_id in rng.choices(list(shares), list(shares.values()), k=num_games):
        has_board = env_id.partition("-v0")[0] in BOARD_GAMES
        seen: Observation = "board" if has_board and rng.random() < 0.5 else "env"
        env = environment_of(EnvSpec(env_id=env_id, num_players=2, observation=seen), rng.getrandbits(31))
        game, done = list[Turn](), False
        while not done:
            _, observation = env.observe()
            actions = action_probabilities(env_id, observation)
            probabilities = tuple(actions.values())
            chosen = rng.choices(range(len(actions)), probabilities)[0]
            completions = tuple(f"\\boxed{{{action}}}{END}" for action in actions)
            game.append(Turn(tiny_prompt(observation), completions, probabilities, chosen))
            done = env.step(list(actions)[chosen])
        last = TURNS_PER_GAME // 2
        early, late = game[:-last], game[-last:]
        turns += late + rng.sample(early, min(TURNS_PER_GAME - last, len(early)))
    rng.shuffle(turns)
    return turns


def tokenizer_corpus(turns: list[Turn], *, has_others: bool) -> Iterator[str]:
    """Yield the texts between special tokens, as the tokenizer will see them."""
    for turn in turns:
        user, assistant = turn.prompt.split(END)
        yield user.removeprefix(START)
        yield assistant.removeprefix(f"\n{START}")
        yield turn.completions[turn.chosen].removesuffix(END)
    for env_id in OTHER_ENVS if has_others else ():
        for seed in range(2):
            _, observation = Environment(f"{env_id}-train", _players(env_id), seed).observe()
            yield f"user\n{observation}"


def _players(env_id: str) -> int:
    single = ("2048", "Blackjack", "FrozenLake", "Guess", "Master", "Mines", "Secretary", "Tower")
    return 1 if env_id.startswith(single) else 2


def train_tokenizer(turns: list[Turn], name: str) -> PreTrainedTokenizerFast:
    """Train byte-level BPE, which reproduces any UTF-8 text exactly."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pattern = Regex(PRE_TOKENS if name == "tiny" else PRE_TOKENS_OPENSPIEL)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        max_token_length=MAX_TOKEN_LENGTH,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[PAD, START, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_corpus(turns, has_others=name == "tiny"), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Return widths that are multiples of 32, for vLLM's attention on the CPU and for LoRA up to rank 32."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    prompt_ids: list[int]
    completions: list[tuple[int, ...]]
    probabilities: tuple[float, ...]
    chosen: int

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.completions[self.chosen]]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completions[self.chosen])

    def next_tokens(self) -> list[dict[int, float]]:
        """Return the player's distribution for each token of the chosen completion, given the tokens before it."""
        possible, distributions = list(zip(self.completions, self.probabilities, strict=True)), []
        for position, token in enumerate(self.completions[self.chosen]):
            weights: dict[int, float] = defaultdict(float)
            for completion, probability in possible:
                weights[completion[position]] += probability
            total = sum(weights.values())
            distributions.append({t: weight / total for t, weight in weights.items()})
            possible = [one for one in possible if one[0][position] == token]
        return distributions


def encode_turns(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> list[EncodedTurn]:
    """Encode prompt and completion separately, as an engine does; leave out a few very long turns."""

    @cache
    def completion_ids(completion: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(completion, add_special_tokens=False))

    prompts = tokenizer([turn.prompt for turn in turns], add_special_tokens=False)["input_ids"]
    encoded = (
        EncodedTurn(prompt_ids, [completion_ids(c) for c in turn.completions], turn.probabilities, turn.chosen)
        for prompt_ids, turn in zip(prompts, turns, strict=True)
    )
    return [turn for turn in encoded if len(turn) <= MAX_TURN_TOKENS]


def batches(turns: list[EncodedTurn], tokens: int, rng: random.Random) -> Iterator[list[EncodedTurn]]:
    """Yield batches forever, in random order: turns of similar length, at most `tokens` with padding."""
    while True:
        chunk = rng.sample(turns, min(len(turns), 16_384))
        chunk.sort(key=len)
        groups: list[list[EncodedTurn]] = [[]]
        for turn in chunk:
            if (len(groups[-1]) + 1) * len(turn) > tokens:
                groups.append([])
            groups[-1].append(turn)
        rng.shuffle(groups)
        yield from (group for group in groups if group)


def imitation_loss(
    model: Qwen3ForCausalLM, batch: list[EncodedTurn], observation_share: float
) -> tuple[torch.Tensor, float]:
    """Return the loss, and the divergence from the player of mixed strength in nats per turn.

    Shapes: `B` turns, `T` tokens, `N` answer tokens of all turns, `K` possible tokens of all `N`.
    """
    width = max(map(len, batch))
    ids_BT = torch.zeros((len(batch), width), dtype=torch.long)
    is_prompt_BT = torch.zeros((len(batch), width), dtype=torch.bool)
    at_N: list[int] = []
    n_K: list[int] = []
    token_K: list[int] = []
    probability_K: list[float] = []
    for row, turn in enumerate(batch):
        ids_BT[row, : len(turn)] = torch.tensor(turn.token_ids)
        is_prompt_BT[row, 1 : len(turn.prompt_ids)] = True
        for position, distribution in enumerate(turn.next_tokens(), len(turn.prompt_ids) - 1):
            n_K += [len(at_N)] * len(distribution)
            token_K += distribution.keys()
            probability_K += distribution.values()
            at_N.append(row * (width - 1) + position)
    # Padding is on the right and attention is causal: no row sees it.
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    logp_NV = model.lm_head(hidden_BTD.flatten(0, 1)[at_N]).float().log_softmax(-1)
    p_K = torch.tensor(probability_K)
    cross_entropy = -(p_K * logp_NV[n_K, token_K]).sum() / len(batch)
    entropy = -float((p_K * p_K.log()).sum()) / len(batch)
    predicts_BT = (is_prompt_BT & (torch.rand(is_prompt_BT.shape) < observation_share))[:, 1:]
    logits_MV = model.lm_head(hidden_BTD[predicts_BT]).float()
    observation = F.cross_entropy(logits_MV, ids_BT[:, 1:][predicts_BT], reduction="sum")
    loss: torch.Tensor = cross_entropy + OBSERVATION_WEIGHT * observation / max(1, len(logits_MV))
    return loss, float(cross_entropy.detach()) - entropy


def train_model(
    model: Qwen3ForCausalLM,
    turns: list[EncodedTurn],
    *,
    steps: int,
    rng: random.Random,
    batch_tokens: int = 4096,
    learning_rate: float = 6e-3,
) -> float:
    """Imitate `turns` for `steps` steps. Returns the mean divergence of the last tenth."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=learning_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    warmup = min(100, max(1, steps // 10))
    recent: list[float] = []
    started = time.perf_counter()
    model.train()
    for step, batch in zip(range(steps), batches(turns, batch_tokens, rng), strict=False):
        progress = step / steps
        scale = min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * scale
        loss, divergence = imitation_loss(model, batch, OBSERVATION_SHARE)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        recent.append(divergence)
        if (step + 1) % 100 == 0:
            elapsed = time.perf_counter() - started
            mean = sum(recent[-100:]) / 100
            _say(f"step {step + 1}/{steps}  {elapsed:.0f} s  {mean:.4f} nats from the player")
    return sum(recent[-max(1, steps // 10) :]) / max(1, min(len(recent), steps // 10))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the files that `from_pretrained` and vLLM read, in bf16."""
    output.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.bfloat16()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    # The template belongs in tokenizer_config.json: one file less, and vLLM reads it there.
    template = output / "chat_template.jinja"
    config_file = output / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["chat_template"] = CHAT_TEMPLATE
    config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    template.unlink(missing_ok=True)


def make(output: Path, *, games: int, steps: int, seed: int, name: str = "tiny") -> float:
    """Run the whole recipe. Returns the divergence from the player in nats per turn."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    started = time.perf_counter()
    turns = play_games(games, rng, GAME_SHARES[name])
    _say(f"{len(turns)} turns of {games} games in {time.perf_counter() - started:.0f} s")
    tokenizer = train_tokenizer(turns[:20_000], name)
    encoded = encode_turns(tokenizer, turns)
    mean_len = sum(map(len, encoded)) / len(encoded)
    _say(f"{len(tokenizer)} tokens in the vocabulary, {mean_len:.1f} in a turn")
    model = Qwen3ForCausalLM(make_config(tokenizer))
    nats = train_model(model, encoded, steps=steps, rng=rng)
    save(model, tokenizer, output)
    return nats


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make builtin:tiny, the default model, or builtin:tiny-games.")
    parser.add_argument("--model", choices=list(GAME_SHARES), default="tiny")
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights and the tokenizer")
    parser.add_argument("--games", type=int, default=20_000, help="number of games to play")
    parser.add_argument("--steps", type=int, default=3000, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    nats = make(args.output, games=args.games, steps=args.steps, seed=args.seed, name=args.model)
    _say(f"{args.output}: {nats:.4f} nats per turn from the player of its games")


if __name__ == "__main__":
    main()
