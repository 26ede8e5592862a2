"""A player is asked in every decision state, and its answers count as its games would read them."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fakes.game_records import make_generation
from fakes.openai_server import Answer, chat_reply, serving
from unstable_lite.config.games import EvalEnvSpec, OpponentsConfig
from unstable_lite.errors import OpponentError
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.games.openspiel.players import solved
from unstable_lite.games.players import openai_compatible
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.rollout.collector import LockStep
from unstable_lite.rollout.sampled_policy import SampledPolicy, sample_policy
from unstable_lite.types import GameSpec, Generation, ModelRef

pytest.importorskip("pyspiel")

KUHN = "openspiel:kuhn_poker"
TREE = flatten(KUHN)
POLICY = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)


def game_of(model: ModelRef, number: int = -1, **settings: Any) -> GameSpec:
    env = EvalEnvSpec(env_id=KUHN, num_players=2, prompt_template="tiny", **settings)
    return new_game(env, [model] * 2, number, "eval", seed=0)


async def answers_of(text: Callable[[str], str], samples: int = 2, **settings: Any) -> SampledPolicy:
    """Return the counts of a policy whose answer is a function of its prompt."""

    async def generate(prompt: str, *_: Any, **options: Any) -> Generation:
        assert "sampling" not in options, "an evaluation's own sampling"
        return make_generation([], text=text(prompt))

    return await sample_policy(PlayerFactory(generate), game_of(POLICY, **settings), TREE, samples, concurrency=5)


@pytest.mark.parametrize(
    ("spelling", "is_legal"),
    [
        ("\\boxed{{{}}}", True),
        ("I hold a Queen. \\boxed{{[{}]}}", True),
        ("<think>\\boxed{{nothing}}</think> \\boxed{{ [{}] }}", True),
        ("\\boxed{{[{}] [{}]}}", False),
        ("<think>\\boxed{{{}}}", False),
        ("\\boxed{{resign}}", False),
    ],
)
async def test_answer_counts_as_in_play(spelling: str, is_legal: bool) -> None:
    found = await answers_of(lambda prompt: spelling.format(*[re.findall(r"\[(\w+)\]", prompt)[-2]] * 2))
    expected = [1.0, 0.0, 0.0] if is_legal else [0.0, 0.0, 1.0]
    assert all(half.tolist() == expected for counts in found.counts_2O for half in counts)


@pytest.mark.parametrize("samples", [2, 7])
async def test_each_half_of_each_state_has_its_answers(samples: int) -> None:
    asked: Counter[str] = Counter()

    def answer(prompt: str) -> str:
        asked[prompt] += 1
        return "\\boxed{nothing}"

    found = await answers_of(answer, samples, temperature=0)
    assert found.num_answers == 12 * samples and set(asked.values()) == {samples} and len(asked) == 12
    for counts in found.counts_2O:
        assert counts.sum(1).tolist() == [(samples + 1) // 2, samples // 2]


async def test_each_state_is_answered_by_the_policy_at_its_seat() -> None:
    asked: Counter[int] = Counter()

    async def generate(_prompt: str, version: int, *_: Any, **_options: Any) -> Generation:
        asked[version] += 1
        return make_generation([])

    seats = [ModelRef(uid=f"{name}/ckpt-{n}", kind="checkpoint", adapter_version=n) for n, name in enumerate("ab", 1)]
    env = EvalEnvSpec(env_id=KUHN, num_players=2, prompt_template="tiny")
    await sample_policy(PlayerFactory(generate), new_game(env, seats, -1, "eval", seed=0), TREE, 2, 5)
    assert asked == Counter(state.seat + 1 for state in TREE.states for _ in range(2))


async def test_scripted_player_is_asked_as_a_new_player_each_time() -> None:
    model = ModelRef(uid="fixed-scripted:cfr", kind="fixed", name="scripted:cfr")
    found = await sample_policy(PlayerFactory(None), game_of(model), TREE, 400, 64)  # type: ignore[arg-type]
    for state, counts in zip(TREE.states, found.counts_2O, strict=True):
        chances = dict(solved(KUHN)[state.observation])
        expected = [chances[f"[{action}]"] for action in state.actions]
        assert (counts.sum(0)[:-1] / 400).tolist() == pytest.approx(expected, abs=0.1)


async def test_requests_of_a_run_in_lock_step_have_seeds_of_their_own_and_repeat() -> None:
    async def seeds_at(update: int) -> list[int]:
        seeds = []

        async def generate(_prompt: str, _version: int, _stop: Any, seed: int) -> Generation:
            await asyncio.sleep(0)
            seeds.append(seed)
            return make_generation([])

        lock_step = LockStep(generate)
        seats = PlayerFactory(lock_step.generate, sampling_seed=1)
        await sample_policy(seats, game_of(POLICY, -1 - 36 * update), TREE, 3, 5, lock_step)
        return seeds

    first, again, later = [await seeds_at(update) for update in (0, 0, 1)]
    assert first == again and len({*first, *later}) == 72


async def test_answer_that_an_endpoint_owes_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setattr(openai_compatible, "MAX_RETRIES", 0)
    monkeypatch.setattr(openai_compatible, "PAUSE_S", 0.05)
    model = ModelRef(uid="fixed-vendor/model", kind="fixed", name="vendor/model")
    with serving() as server:

        def answer(body: dict[str, Any]) -> Answer:
            if len(server.bodies) < 5:
                return 500, {"error": {"message": "too busy"}}
            listed = body["messages"][0]["content"].rpartition("actions:")[2]
            return chat_reply("\\boxed{" + re.findall(r"\[\w+\]", listed)[1] + "}")

        server.answer = answer
        opponents = OpponentsConfig(base_url=server.url)
        async with PlayerFactory(None, opponents=opponents) as seats:  # type: ignore[arg-type]
            found = await sample_policy(seats, game_of(model), TREE, 4, 3)
        assert all(counts.sum(0).tolist() == [0, 4, 0] for counts in found.counts_2O)
        server.answer = lambda _body: (401, {"error": {"message": "no such key"}})
        monkeypatch.setattr(openai_compatible, "OUTAGE_S", 0.0)
        async with PlayerFactory(None, opponents=opponents) as seats:  # type: ignore[arg-type]
            with pytest.raises(ExceptionGroup) as caught:
                await sample_policy(seats, game_of(model), TREE, 4, 3)
        assert caught.group_contains(OpponentError, match="no such key|down for")
