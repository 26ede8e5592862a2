"""The whole idea in one file and one process: a language model learns a game by playing it.

    python examples/minimal_loop.py --updates 60

No engine process, no sockets, no league, no resume. Games of Nim are played in lock step against a random player (70 %)
or against the model itself (30 %), and each batch of turns makes one REINFORCE update of a LoRA adapter. The package
does the same with games that never wait for the learner; `docs/architecture.md` names the file for each part below.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

import peft
import torch
import transformers
from torch import Tensor

from unstable_lite.games.answers import extract_boxed
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.scripted import random_legal_action
from unstable_lite.games.templates import format_prompt
from unstable_lite.models import resolve_model
from unstable_lite.tracking.intervals import percent, share_interval

ENV_ID, NUM_PLAYERS = "Nim-v0-train", 2
MAX_TURNS, MAX_NEW_TOKENS = 40, 16
LEARNING_RATE, KL_COEFFICIENT, INVALID_PENALTY = 1e-3, 0.1, -1.0


@dataclass
class Step:
    """One turn of the model."""

    prompt_ids: list[int]
    completion_ids: list[int]
    seat: int
    is_invalid: bool = False
    advantage: float = 0.0


@dataclass
class Game:
    """One game in progress; `seats` are those that the model plays."""

    env: Environment
    seats: tuple[int, ...]
    turn: tuple[int, str] | None
    num_turns: int = 0
    steps: list[Step] = field(default_factory=list)


class Model:
    """A language model with a LoRA adapter: `answer` samples, `update` learns."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        path = resolve_model("builtin:tiny")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=32, lora_alpha=64, target_modules=targets, task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, config).eval()  # neither base nor adapter has dropout
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0)

    @torch.no_grad()
    def answer(self, prompts: list[str]) -> list[tuple[list[int], list[int]]]:
        """Sample a completion for each prompt; return the ids of prompts and completions, with the end token."""
        prompt_ids = [self.tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        width = max(map(len, prompt_ids))
        tokens_BT = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompt_ids])
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids])
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": MAX_NEW_TOKENS}
        self.model.merge_adapter()  # one product per layer instead of three
        out_BT = self.model.generate(input_ids=tokens_BT, attention_mask=mask_BT, **sampling)
        self.model.unmerge_adapter()
        end = self.model.generation_config.eos_token_id
        answers = []
        for ids, row in zip(prompt_ids, out_BT[:, width:].tolist(), strict=True):
            answers.append((ids, row[: row.index(end) + 1] if end in row else row))
        return answers

    def update(self, steps: list[Step], learning_rate: float, rows: int = 32) -> dict[str, float]:
        """Make one REINFORCE step that stays near the base model, in micro-batches of `rows` steps."""
        num_tokens = sum(len(step.completion_ids) for step in steps)
        kl = 0.0
        for start in range(0, len(steps), rows):
            part = steps[start : start + rows]
            logp_N, kl_N = self._logprobs(part)
            advantage_N = torch.tensor([step.advantage for step in part for _ in step.completion_ids])
            loss = -(advantage_N * logp_N).sum() + KL_COEFFICIENT * kl_N.sum()
            (loss / num_tokens).backward()
            kl += kl_N.sum().item()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 0.2)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"kl": kl / num_tokens, "gradient_norm": float(norm)}

    def _logprobs(self, steps: list[Step]) -> tuple[Tensor, Tensor]:
        """Return each completion token's log-probability, and KL(policy ‖ base) at its place."""
        log_p_NV = self._distributions(steps)
        with torch.no_grad(), self.model.disable_adapter():
            base_log_p_NV = self._distributions(steps)
        target_N = torch.tensor([token for step in steps for token in step.completion_ids])
        kl_N = (log_p_NV.exp() * (log_p_NV - base_log_p_NV)).sum(-1)
        return log_p_NV.gather(1, target_N[:, None])[:, 0], kl_N

    def _distributions(self, steps: list[Step]) -> Tensor:
        """Return the log-probability of each vocabulary entry at every completion token."""
        rows = [step.prompt_ids + step.completion_ids for step in steps]
        width = max(map(len, rows))
        # Padded on the right: under causal attention no token sees the padding.
        logits_BTV = self.model(torch.tensor([row + [0] * (width - len(row)) for row in rows])).logits
        return torch.cat(
            [logits_BTV[b, len(step.prompt_ids) - 1 : len(rows[b]) - 1].log_softmax(-1) for b, step in enumerate(steps)]
        )


def new_game(seed: int, seats: tuple[int, ...]) -> Game:
    env = Environment(ENV_ID, NUM_PLAYERS, seed, "board")
    return Game(env, seats, env.observe())


def play(model: Model, games: list[Game], rng: random.Random) -> list[dict[int, float]]:
    """Play all games to their ends, one batch of answers after the other; return each game's rewards."""
    while active := [game for game in games if game.turn is not None and game.num_turns < MAX_TURNS]:
        asked = [game for game in active if game.turn is not None and game.turn[0] in game.seats]
        prompts = [format_prompt("tiny", game.turn[1], NUM_PLAYERS) for game in asked if game.turn is not None]
        answers = iter(model.answer(prompts) if prompts else [])
        for game in active:
            assert game.turn is not None
            seat, observation = game.turn
            if seat in game.seats:
                prompt_ids, completion_ids = next(answers)
                text = model.tokenizer.decode(completion_ids, skip_special_tokens=True)
                action, _ = extract_boxed(text)
                game.steps.append(Step(prompt_ids, completion_ids, seat))
            else:
                action = random_legal_action(ENV_ID, observation, rng)
            game.turn = game.env.play(action)
            game.num_turns += 1
            if seat in game.seats:
                game.steps[-1].is_invalid = game.env.was_invalid
    return [game.env.close()[0] if game.turn is None else game.env.rewards_so_far() for game in games]


def evaluate(model: Model, num_games: int, seed: int) -> str:
    """Return the share of wins against the random player, from both seats, with its 95 % interval."""
    games = [new_game(seed + number // 2, (number % 2,)) for number in range(num_games)]
    rewards = play(model, games, random.Random(seed))
    wins = [float(reward[game.seats[0]] > 0) for game, reward in zip(games, rewards, strict=True)]
    low, high = share_interval([wins[first : first + 2] for first in range(0, num_games, 2)])
    return f"{percent(sum(wins) / num_games)} of {num_games} games won (95 %: {percent(low)} – {percent(high)})"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=384, help="turns per update")
    parser.add_argument("--games", type=int, default=48, help="games in lock step")
    parser.add_argument("--eval-games", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    model, rng = Model(given.seed), random.Random(given.seed)
    print(f"before: {evaluate(model, given.eval_games, 10_000)}")
    baselines = [0.0] * NUM_PLAYERS
    """Mean reward of each seat, because one of them has the better game."""
    for update in range(given.updates):
        steps: list[Step] = []
        while len(steps) < given.batch_size:
            seats = [(0, 1) if rng.random() < 0.3 else (rng.randrange(NUM_PLAYERS),) for _ in range(given.games)]
            games = [new_game(rng.randrange(1 << 30), seats_of_game) for seats_of_game in seats]
            for game, rewards in zip(games, play(model, games, rng), strict=True):
                for seat in game.seats:
                    baselines[seat] += 0.01 * (rewards[seat] - baselines[seat])
                for step in game.steps:
                    step.advantage = rewards[step.seat] - baselines[step.seat] + INVALID_PENALTY * step.is_invalid
                steps += game.steps
        metrics = model.update(steps, LEARNING_RATE * (1 - update / given.updates))
        invalid = sum(step.is_invalid for step in steps) / len(steps)
        print(
            f"update {update + 1}: {len(steps)} steps, {invalid:.1%} invalid, KL {metrics['kl']:.3f} nats, "
            f"gradient norm {metrics['gradient_norm']:.2f}"
        )
    print(f"after: {evaluate(model, given.eval_games, 10_000)}")


if __name__ == "__main__":
    main()
