"""The learner computes the same on CUDA devices as on the CPU."""

import pytest
import torch

from fakes import runs
from fakes.learner_fixtures import turns_of_games
from unstable_lite.learner import load_learner, worker

# A warning of CUDA's libraries names the Python line that runs at that moment, so also lines of this project.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c", "ppo", "grpo"])
def test_update_on_a_gpu_equals_that_on_the_cpu(make_config, make_items, algorithm):
    config, after = make_config(algorithm, learner={"max_tokens_per_micro_batch": 64}), {}
    for device in ("cpu", "cuda:0"):
        learner, items = load_learner(config, device), make_items()
        for version in (1, 2):
            assert learner.update(items, version).skipped is None
        after[device] = {name: tensor.detach().cpu() for name, tensor in learner.policy.parameters.items()}
    error = torch.cat([(after["cuda:0"][name] - expected).abs().flatten() for name, expected in after["cpu"].items()])
    # AdamW first steps by the sign of a gradient, 1e-3 here, and rounding may change that sign near zero.
    assert (error > 2e-4).float().mean() < 0.01


def test_gradient_of_a_forest_on_a_gpu_is_that_of_rows(make_config):
    learner, items, gradients = load_learner(make_config(), "cuda:0"), turns_of_games(4), []
    assert (learner.policy.layout, learner.policy.warning) == ("forest", None)
    for layout in ("forest", "rows"):
        learner.policy.layout = layout
        learner.add_gradient(items)
        used = [parameter.grad for parameter in learner.policy.parameters.values() if parameter.grad is not None]
        gradients.append(torch.cat([gradient.flatten() for gradient in used]))
        learner.training.optimizer.zero_grad(set_to_none=True)
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[1].norm()


def test_learner_takes_no_more_than_its_share_of_memory(make_config):
    config, device = make_config(learner={"gpu_memory_utilization": 0.05}), torch.device("cuda:0")
    worker.make_workers(config, "cuda:0")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.06 * torch.cuda.mem_get_info(device)[1]), dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.two_gpus
def test_two_gpus_train_as_two_ranks(tmp_path):
    ranks = ("learner.devices=[0,1]", "engine.devices=[0]")
    runs.output_of(runs.run("run", runs.write_small(tmp_path), *ranks))
    assert runs.num_updates(tmp_path) == 3
