"""Error rates of the canary with the bfloat16 noise recorded from a real model (noise/record.py)."""

from collections.abc import Callable

import numpy as np
import pytest

from fakes.noise.simulation import TOLERANCE, World, recorded
from unstable_lite.adapters.canary import Check, Evidence, Floats, Noise

EFFECTS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Mean change of log p by an adapter, from an untrained one to one far from the base."""


@pytest.mark.nightly
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_rounding_is_never_taken_for_wrong_weights(scale: float) -> None:
    """Check 10,000 new adapters and 10,000 returns: 100 runs, each with the noise measured at its own start."""
    measured, world = World(), World(scale, seed=1)
    alarms = doubts = tokens = 0
    for _ in range(100):
        noise, new, returned = measured.noise(), Evidence(), Evidence()
        for number in range(100):
            effect = EFFECTS[number % len(EFFECTS)]
            for check in (world.add(noise, new, effect), world.come_back(noise, returned, effect)):
                alarms += check.evidence.is_wrong
                doubts += check.evidence.is_open
                tokens += check.num_tokens
    assert alarms == 0
    assert doubts <= 2
    assert tokens < 20_000 * 40  # a right engine costs little more than the first 32 tokens


def checks_until_wrong(noise: Noise, draw: Callable[[], tuple[Floats, ...]], num_completions: int = 4) -> float:
    """Return after how many checks an engine is found wrong, at most 1000. `draw`: log p by engine, learner, base."""
    evidence = Evidence()
    for number in range(1000):
        evidence.begin()
        for _ in range(num_completions):
            evidence.add(noise, *draw())
        if evidence.is_wrong:
            return number + 1
    return np.inf


def test_policy_surer_than_the_base_is_not_taken_for_wrong_weights() -> None:
    """Rounding hardly changes log p of a nearly certain token."""
    tokens, rng = np.concatenate(recorded()), np.random.default_rng(0)
    likely, other = tokens[tokens[:, 1] > -0.5], tokens[tokens[:, 1] < -2.0]
    assert np.abs(other[:, 0]).mean() > 4 * np.abs(likely[:, 0]).mean()

    def draw() -> tuple[Floats, ...]:
        differences, learner = rng.choice(other, 16).T
        return learner + differences, learner, learner

    assert checks_until_wrong(Noise(*likely.T, TOLERANCE), draw) == np.inf


@pytest.mark.parametrize(("share", "most"), [(1.0, np.inf), (0.9, 10), (1.1, 10)])
def test_wrong_scale_but_not_rounding_is_found_far_from_the_base(share: float, most: float) -> None:
    """An adapter moved the logits of 8 tokens by 12 nats; each logit is rounded to bfloat16."""
    differences, learner = np.concatenate(recorded()).T
    small = np.stack([differences * 0.0075 / np.abs(differences).mean(), learner], axis=1)  # as of a small model
    rng, effect = np.random.default_rng(0), 12.0

    def draw() -> tuple[Floats, ...]:
        differences, learner = rng.choice(small, 8).T
        rounding = rng.uniform(-effect / 128, effect / 128, 8)
        return learner + differences + rounding + (share - 1) * effect, learner, learner - effect

    num_checks = checks_until_wrong(Noise(*small.T, TOLERANCE), draw)
    assert num_checks == most if most == np.inf else num_checks <= most


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_no_run_is_refused_at_its_start_because_of_rounding(scale: float) -> None:
    world = World(scale)
    levels = [world.start().level for _ in range(500)]
    assert max(levels) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "mean", "most"),
    [("base", 0.03, 2000), ("base", 0.1, 500), ("base", 0.3, 300), ("twice", 0.3, 300), ("other", 0.3, 300)],
)
def test_wrong_weights_are_found(kind: str, mean: float, most: int) -> None:
    world = World()
    tokens = [world.tokens_to_catch(world.noise(), kind, mean) for _ in range(50)]
    assert max(tokens) <= most


def in_float32(num_tokens: int = 256) -> Noise:
    return Noise(np.random.default_rng(0).normal(0.0, 1e-5, num_tokens), np.zeros(num_tokens), TOLERANCE)


@pytest.mark.parametrize("noise", [in_float32(), Noise(np.zeros(256), np.zeros(256), TOLERANCE)])
@pytest.mark.parametrize("gap", [5e-4, 0.1])
def test_few_answers_are_enough_in_float32(noise: Noise, gap: float) -> None:
    """The same holds if engine and learner agreed to the last bit at the start."""
    evidence, base = Evidence(), np.full(4, -gap)
    for _ in range(8):
        evidence.add(noise, base, np.zeros(4), base)  # the base answers
    assert evidence.is_wrong
    assert "base" in evidence.suspicion and "too small" in evidence.suspicion
    assert np.isfinite(evidence.logs).all()


def test_bit_exact_engine_passes() -> None:
    evidence = Evidence()
    for noise in (Noise(np.zeros(256), np.zeros(256), TOLERANCE), Noise([], [], TOLERANCE)):
        evidence.add(noise, np.zeros(64), np.zeros(64), np.full(64, -0.1))
        assert evidence.logs[:-1].max() < 0


@pytest.mark.parametrize("noise", [in_float32(), World().noise()])
def test_engine_with_different_first_tokens_fails(noise: Noise) -> None:
    """Such an engine leaves no token to compare."""
    check = Check(Evidence(), noise, TOLERANCE, first=2, sampled=12)
    for number in range(12):
        prompt, now, then = (np.full(size, number + size, np.int32) for size in (1, 16, 15))
        check.add_again(prompt, now, then, *[np.full(15, -1.0)] * 3)
    assert check.num_tokens == 0
    assert check.evidence.is_wrong
    assert "tokens" in check.evidence.suspicion


def test_no_single_completion_ends_a_run() -> None:
    evidence = Evidence()
    evidence.add(in_float32(), np.full(512, 5.0), np.zeros(512), np.zeros(512))
    assert evidence.is_open
    assert not evidence.is_wrong


def test_evidence_against_an_engine_is_kept_and_evidence_for_it_is_not() -> None:
    noise, evidence = in_float32(), Evidence()
    for _ in range(100):
        evidence.begin()
        evidence.add(noise, np.zeros(16), np.zeros(16), np.full(16, -0.1))
    evidence.begin()
    assert not evidence.logs.any()
    wrong = np.full(4, 0.5), np.zeros(4), np.zeros(4)
    assert 4 <= checks_until_wrong(noise, lambda: wrong, num_completions=1) <= 8


def test_repeated_tokens_after_the_same_prefix_count_once() -> None:
    check, prompt = Check(Evidence(), None, TOLERANCE, first=2, sampled=8), np.array([1, 2], np.int32)
    for asked, ids in ((prompt, [5, 6, 7]), (prompt, [5, 6, 8, 7]), (prompt[:1], [5])):
        check.add(asked, np.array(ids, np.int32), np.array(ids, np.float32), *[np.zeros(len(ids), np.float32)] * 2)
    assert [part.tolist() for part in check.differences] == [[5, 6, 7], [8, 7], [5]]
    assert check.num_tokens == 6


def test_clear_check_ends_after_its_first_round_and_a_doubtful_continues() -> None:
    def check_of(engine: float) -> tuple[Check, list[int]]:
        check, rounds = Check(Evidence(), in_float32(), TOLERANCE, first=2, sampled=8), []
        while wanted := check.num_wanted():
            rounds.append(wanted)
            for number in range(check.num_completions, wanted):
                ids, zeros = np.full(4, number, np.int32), np.zeros(4)
                check.add(ids, ids, zeros + engine, zeros, zeros)
        return check, rounds

    check, rounds = check_of(0.0)
    assert rounds == [2]
    assert not check.evidence.is_open
    check, rounds = check_of(0.5)
    assert rounds == [2, 8]
    assert check.evidence.is_wrong


def test_model_with_one_possible_token_is_asked_up_to_the_limit() -> None:
    check = Check(Evidence(), None, TOLERANCE, first=2, sampled=8)
    while wanted := check.num_wanted():
        while check.num_completions < wanted:
            one = np.zeros(1, np.int32)
            check.add(one, one, np.zeros(1), np.zeros(1), np.zeros(1))
    assert check.num_tokens == 1
    assert check.num_completions == 128
