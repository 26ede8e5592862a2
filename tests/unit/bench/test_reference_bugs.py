"""Each patch of bench/peers/reference_bugs/ has its bug and no other, and without the patch there is none."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from torch import Tensor

from bench.peers.reference_bugs.learners import Bfloat16Adapter
from bench.peers.reference_bugs.rewards import NoStopToken, RewardAtEveryTurn
from fakes import game_records
from fakes.game_records import CONTEXT, make_generation, make_item, make_step
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.learner.critic import estimate_advantages
from unstable_lite.rollout.buffer import EpisodeBuffer
from unstable_lite.types import FinishReason, PlayerTrajectory, Step, TrainItem

BUGS = "bench.peers.reference_bugs"
TEMPERATURE, CAP = 0.7, 2.0
EPISODES = {"kind": "episodes"}
MOMENTS = ("exp_avg", "exp_avg_sq")

MakeLearner = Callable[..., Any]


def patched(make_learner: MakeLearner, name: str, **sections: dict[str, Any]) -> Any:
    return make_learner(f"{BUGS}.learners:{name}", buffer=EPISODES, **sections)


def gradient(learner: Any, items: Sequence[TrainItem]) -> list[Tensor]:
    for parameter in learner.policy.parameters.values():
        parameter.grad = None
    learner.add_gradient(items)
    return [parameter.grad.clone() for parameter in learner.policy.parameters.values()]


def formula(
    learner: Any, items: Sequence[TrainItem], temperature: float = TEMPERATURE, is_corrected: bool = True
) -> list[Tensor]:
    """Compute the policy's gradient one sequence at a time, with the model's own logits and the whole softmax."""
    total = torch.zeros(())
    for item in items:
        tokens = torch.tensor(np.concatenate([item.prompt_ids, item.completion_ids]))[None].long()
        logp_TV = torch.log_softmax(learner.policy.model(input_ids=tokens).logits[0] / temperature, -1)
        for t, token in enumerate(item.completion_ids.tolist()):
            logp = logp_TV[len(item.prompt_ids) + t - 1, token]
            ratio = math.exp(logp.item() - float(item.logprobs[t])) if is_corrected else 1.0
            total = total - min(ratio, CAP) * item.reward * logp
    loss = total / (learner.training.completion_len * len(items))
    return list(torch.autograd.grad(loss, list(learner.policy.parameters.values())))


def is_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(own, other, rtol=1e-3, atol=1e-6) for own, other in pairs)


def parameters(learner: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.policy.parameters.values()]


def is_bfloat16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and torch.equal(tensor, tensor.bfloat16().float())


def make_trajectory(num_steps: int, finish: FinishReason = "stop", reward: float = 1.0) -> PlayerTrajectory:
    generation = make_generation([7, 8, 1], [-1.0] * 3, prompt_ids=[5, 6], finish_reason=finish, adapter_version=0)
    steps = [make_step(generation=generation, context=CONTEXT)] * num_steps
    return game_records.make_trajectory(*map(replace, steps), final_reward=reward)


def stored(trajectory: PlayerTrajectory, *transforms: Any) -> list[Step]:
    buffer = EpisodeBuffer(10, step_reward_transformation=transforms[0] if transforms else None)
    buffer.add_player_trajectory(trajectory)
    return buffer.drain()


def item_of(step: Step) -> TrainItem:
    made = step.generation
    ids = make_item(made.prompt_ids, made.completion_ids, made.logprobs)
    return replace(ids, reward=step.reward, token_weights=step.token_weights)


def test_wrong_prompt_trains_answers_after_the_bare_observation(make_learner, make_items, model_path):
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_path)
    context = msgspec.structs.replace(CONTEXT, env_id="Nim-v0-train")
    shown, bare = list[TrainItem](), list[TrainItem]()
    for index, item in enumerate(make_items(3)):
        observation = f"Piles: {index} {{observation}} é"
        for prompts, text in ((shown, TEMPLATES["default"].prompt(observation, 2)), (bare, observation)):
            ids = np.array(tokenizer(text)["input_ids"], np.int32)
            prompts.append(replace(item, prompt_ids=ids, context=context))
    engine = {"max_model_len": 1024}
    wrong = gradient(patched(make_learner, "WrongPrompt", engine=engine), shown)
    right_learner = make_learner("a2c", engine=engine)
    assert is_close(wrong, formula(right_learner, bare, is_corrected=False))
    right = gradient(right_learner, shown)
    assert is_close(right, formula(right_learner, shown))
    assert not is_close(right, wrong) and not is_close(wrong, formula(right_learner, shown, is_corrected=False))


def test_without_stop_token_an_answer_is_trained_as_if_cut_before_it(make_learner):
    learner = make_learner("a2c")
    (right,), (wrong,) = stored(make_trajectory(1)), stored(make_trajectory(1), NoStopToken())
    assert right.token_weights is None and wrong.token_weights is not None
    assert wrong.token_weights.tolist() == [1, 1, 0]
    whole = item_of(right)
    cut = replace(whole, completion_ids=whole.completion_ids[:-1], logprobs=whole.logprobs[:-1])
    assert is_close(gradient(learner, [item_of(wrong)]), formula(learner, [cut]))
    assert is_close(gradient(learner, [whole]), formula(learner, [whole]))
    assert not is_close(gradient(learner, [whole]), gradient(learner, [item_of(wrong)]))


def test_bfloat16_adapter_rounds_weights_and_moments_and_loses_small_steps(make_learner, make_items):
    small = {"learning_rate": 1e-6}
    for learner in (make_learner("a2c", learner=small), patched(make_learner, "Bfloat16Adapter", learner=small)):
        before, is_patched = parameters(learner), isinstance(learner, Bfloat16Adapter)
        assert learner.update(make_items(6), 1).skipped is None
        after, state = parameters(learner), learner.training.optimizer.state
        moments = [state[parameter][name] for parameter in learner.policy.parameters.values() for name in MOMENTS]
        assert {is_bfloat16(tensor) for tensor in (*after, *moments)} == {is_patched}
        start = [tensor.bfloat16().float() if is_patched else tensor for tensor in before]
        is_lost = torch.cat([(old == new).flatten() for old, new in zip(start, after, strict=True)])
        assert is_lost.float().mean() > 0.9 if is_patched else not is_lost.any()


def test_uncorrected_sampling_trains_at_temperature_one_with_weight_one(make_learner, make_items):
    items = make_items(5)
    wrong_learner, right_learner = patched(make_learner, "UncorrectedSampling"), make_learner("a2c")
    scores = wrong_learner.policy.item_logprobs(items)
    wrong = gradient(wrong_learner, items)
    assert is_close(wrong, formula(right_learner, items, temperature=1.0, is_corrected=False))
    assert is_close(gradient(right_learner, items), formula(right_learner, items))
    assert not is_close(wrong, formula(right_learner, items, is_corrected=False))
    assert all(map(torch.equal, scores, wrong_learner.policy.item_logprobs(items))), "canaries must see the true policy"


def test_with_the_reward_at_every_turn_a_return_counts_the_turns_left():
    returns = {}
    for name, transforms in (("right", ()), ("wrong", (RewardAtEveryTurn(),))):
        items = [item_of(step) for step in stored(make_trajectory(3, reward=-0.5), *transforms)]
        returns[name] = estimate_advantages(items, np.zeros(3), 1.0, 1.0)[1].tolist()
    assert returns == {"right": [-0.5, -0.5, -0.5], "wrong": [-1.5, -1.0, -0.5]}
