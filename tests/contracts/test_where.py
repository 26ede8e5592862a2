"""Twenty questions of a newcomer, each answered by one file of the package.

The questions were fixed before the modules were arranged in folders. A reader who knows only the names of the files
should find most answers at the first guess.
"""

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "unstable_lite"
ANSWERS = {
    "Where is off-policy staleness bounded by limiting the games in flight?": "rollout/back_pressure.py: InFlight:",
    "Where do steps wait for the learner, and where are stale ones dropped?": "rollout/buffer.py: def _drop_stale",
    "Where is one game played, turn by turn?": "rollout/run_game.py: def run_game",
    "Where is a prompt made from an observation?": "games/templates.py: def format_prompt",
    "Where do I add a scripted opponent?": "games/players/scripted.py: class ",
    "Where do I add a rule that chooses the opponent?": "league/samplers/model_samplers.py: class BaseModelSampler",
    "Where are TrueSkill ratings updated?": "league/model_registry.py: def update_ratings",
    "Where is the average reward of a role subtracted?": "reward_transformations/transforms.py: class RoleAdvantage",
    "Where is PPO?": "learner/algorithms/ppo.py: class PPOLearner",
    "Where are the policy-gradient loss and importance weights computed?": "learner/losses.py: def importance_weights",
    "Where do several learner ranks sum their gradients?": "learner/distributed.py: def sum_gradients",
    "Where are adapters kept in shared memory?": "adapters/store.py: class Adapter",
    "Where is an engine's canary judged?": "adapters/canary.py: class Check",
    "Where are the arguments of vLLM chosen?": "engines/vllm.py: def engine_arguments",
    "Where are the messages between the processes declared?": "transport/messages.py: class Generate",
    "Where is a dead worker restarted?": "orchestrator/supervisor.py: class Supervisor",
    "Where is a checkpoint written and read?": "orchestrator/checkpoint.py: def save_checkpoint",
    "Where do I add an alarm?": "orchestrator/alarms.py: ALARMS = ",
    "Where is the GPU memory of a run predicted?": "planning/memory.py: def learner_memory",
    "Where is the HTML page of the report made?": "dashboards/report/page.py: def render",
}
"""File and landmark by question."""


@pytest.mark.parametrize("question", ANSWERS)
def test_answer_is_where_the_question_says(question):
    path, landmark = ANSWERS[question].split(": ")
    assert landmark in (PACKAGE / path).read_text(encoding="utf-8")
