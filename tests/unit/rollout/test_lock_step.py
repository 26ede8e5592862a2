"""Games in lock step: no request leaves before every game has asked."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from unstable_lite.errors import RequestError
from unstable_lite.rollout.lockstep import LockStep
from unstable_lite.types import Generation


class Engine:
    """A fake engine that records which requests arrive together, and answers after a random time."""

    def __init__(self) -> None:
        self.waves: list[list[int | None]] = [[]]
        self.in_flight = 0
        self.chance = random.Random(1)

    async def generate(self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None) -> Generation:
        if not self.in_flight:
            self.waves.append([])
        self.waves[-1].append(seed)
        self.in_flight += 1
        try:
            await asyncio.sleep(self.chance.random() / 100)
            if prompt == "refused":
                raise RequestError("no")
        finally:
            self.in_flight -= 1
        return Generation(
            prompt_ids=np.array([1], np.int32),
            completion_ids=np.array([2], np.int32),
            logprobs=np.array([-1.0], np.float32),
            text=prompt,
            finish_reason="stop",
            adapter_version=version,
        )


async def test_requests_leave_in_seed_order_once_every_game_asked_or_ended() -> None:
    engine, chance, order = Engine(), random.Random(2), list[int]()
    lock_step = LockStep(engine.generate)

    async def game(number: int, turns: int) -> int:
        for turn in range(turns):
            await asyncio.sleep(chance.random() / 100)
            await lock_step.generate("p", 0, (), 10 * turn + number)
            order.append(10 * turn + number)
        return number

    assert await lock_step.play([game(0, 2), game(1, 3), game(2, 0), game(3, 1)]) == [0, 1, 2, 3]
    assert engine.waves[1:] == [[0, 1, 3], [10, 11], [21]]
    assert order == [0, 1, 3, 10, 11, 21]


async def test_failed_or_abandoned_request_does_not_delay_other_games() -> None:
    engine = Engine()
    lock_step = LockStep(engine.generate)

    async def refused() -> str:
        with pytest.raises(RequestError):
            await lock_step.generate("refused", 0, (), 1)
        return "refused"

    async def impatient() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await lock_step.generate("p", 0, (), 2)
        return "gave up"

    async def slow() -> str:
        await asyncio.sleep(0.1)
        return (await lock_step.generate("last", 0, (), 3)).text

    async with asyncio.timeout(5):
        assert await lock_step.play([refused(), impatient(), slow()]) == ["refused", "gave up", "last"]
    assert engine.waves[1:] == [[1, 3]]


async def test_error_in_one_game_ends_the_round_and_the_next_is_complete() -> None:
    engine = Engine()
    lock_step = LockStep(engine.generate)

    async def broken() -> None:
        raise ValueError("broken")

    async def waits(seed: int) -> None:
        await lock_step.generate("p", 0, (), seed)

    async with asyncio.timeout(5):
        with pytest.raises(ExceptionGroup):
            await lock_step.play([waits(1), broken()])
        await lock_step.play([waits(2), waits(3)])
