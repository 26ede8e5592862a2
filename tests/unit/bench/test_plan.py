"""Plan of engines and learner ranks: tokens are counted as they are, and the cases of the assumptions are in order."""

import pytest

from bench.plan import ENVS, FEWEST, MIDDLE, MODELS, MOST, compute, prompts_of, tokens_of


def test_prompt_token_is_new_if_no_other_prompt_begins_with_it():
    prompts = prompts_of("Nim")
    beginnings = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert tokens_of("Nim", 16)["new_prompt"] * len(prompts) == pytest.approx(len(beginnings))


@pytest.mark.parametrize("env", ENVS)
def test_forest_has_at_least_the_new_tokens_and_fewer_than_rows(env):
    tokens = tokens_of(env, 16)
    assert tokens["new_prompt"] + 16 - 0.1 <= tokens["forest_tokens"] < tokens["prompt"] + 16


@pytest.mark.parametrize("model", MODELS)
def test_each_case_of_the_assumptions_leads_to_more_engines(model):
    fewest, middle, most = (compute(model, tokens_of("Nim", 16), case) for case in (FEWEST, MIDDLE, MOST))
    assert fewest["forest_engines"] < middle["forest_engines"] < most["forest_engines"]
    assert middle["kl_engines"] < middle["forest_engines"]


def test_a_token_is_charged_with_the_tokens_that_it_sees():
    env, answer = "Nim", 3
    tokens, prompts, distinct = tokens_of(env, answer), prompts_of(env), set[tuple[int, ...]]()
    for number, prompt in enumerate(prompts):
        row = (*prompt, *(-1 - answer * number - place for place in range(answer)))  # answers share nothing
        distinct |= {row[:end] for end in range(1, len(row) + 1)}
    lengths = [len(prompt) + answer for prompt in prompts]
    assert tokens["rows_seen"] == pytest.approx(sum(n * (n + 1) / 2 for n in lengths) / sum(lengths))
    # A cut between two forests repeats a few tokens.
    assert tokens["forest_seen"] == pytest.approx(sum(map(len, distinct)) / len(distinct), rel=0.01)
