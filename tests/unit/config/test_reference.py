"""The standard script of UnstableBaselines, as docs/migration.md has it, line by line. Ray is not needed."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unstable_lite as unstable
from unstable_lite.api import build_script
from unstable_lite.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
NIM = 'env_id="Nim-v0-train", num_players=2, prompt_template="tiny"'
GIVEN = {
    "unstable": unstable,
    "retra": unstable.reward_transformations,
    "MODEL_NAME": "builtin:tiny",
    "ray": SimpleNamespace(init=lambda **_: None, get=lambda it: it, kill=lambda *_, **__: None, shutdown=lambda: None),
}
"""Names that the script imports or leaves to the user. Ray's functions come after ours, so they are never reached."""


class WithoutRay(ast.NodeTransformer):
    """`X.options(…).remote(…)` becomes `X(…)`, `x.method.remote(…)` becomes `x.method(…)`, `ray.get(x)` becomes `x`."""

    def visit_Call(self, call: ast.Call) -> ast.expr:
        self.generic_visit(call)
        called = call.func
        if ast.unparse(called) == "ray.get":
            return call.args[0]
        if isinstance(called, ast.Attribute) and called.attr == "remote":
            part = called.value
            is_class = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
            return ast.Call(part.func.value if is_class else part, call.args, call.keywords)
        return call


def lines() -> list[ast.stmt]:
    """Return the script's statements after its imports, up to `train`, those of `try` included."""
    block = PAGE.read_text().partition("## The standard script")[2].partition("```python\n")[2].partition("```")[0]
    block = block.replace('"target_modules": [...]', '"target_modules": ["q_proj", "v_proj"]')
    block = block.replace("train_env_specs=[...]", f"train_env_specs=[unstable.TrainEnvSpec({NIM}, num_actors=1)]")
    block = block.replace("eval_env_specs=[...]", f"eval_env_specs=[unstable.EvalEnvSpec({NIM})]")
    whole = [line for line in ast.parse(block).body if not isinstance(line, ast.Import)]
    return [part for line in whole for part in (line.body if isinstance(line, ast.Try) else [line])]


def run(line: ast.stmt, names: dict[str, Any]) -> str:
    """Run one line; return the message of its ConfigError, or nothing."""
    try:
        exec(compile(ast.Module([ast.fix_missing_locations(line)], []), str(PAGE), "exec"), names)
    except ConfigError as error:
        return str(error)
    return ""


def names_after_all_but_train() -> dict[str, Any]:
    names = dict(GIVEN)
    for line in lines()[:-1]:
        run(WithoutRay().visit(line), names)
    return names


def test_every_line_of_the_script_works_without_rays_words(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    names, messages = dict(GIVEN), {}
    for line in lines()[:-1]:
        messages[ast.unparse(line)] = run(WithoutRay().visit(line), names)
    ((refused, message),) = [(line, message) for line, message in messages.items() if message]
    assert "add_checkpoint" in refused and "the base is there already" in message
    config = build_script(names["learner"].given).plan.config
    assert (config.model_name, config.algorithm, config.run.name) == ("builtin:tiny", "reinforce", "test")
    assert (config.run.num_collection_workers, config.run.num_eval_workers) == (384, 16)
    assert (config.lora.lora_rank, config.lora.target_modules) == (32, ("q_proj", "v_proj"))
    assert (config.engine.temperature, config.engine.max_generation_len, config.engine.max_loras) == (0.6, 4096, 8)
    assert (config.learner.batch_size, config.learner.mini_batch_size, config.learner.learning_rate) == (384, 1, 1e-5)
    assert (config.learner.gradient_clipping, config.learner.activation_checkpointing) == (0.2, True)
    assert (config.buffer_size, config.tracker.wandb_project) == (768, "UnstableBaselines")
    assert config.league.opponent_sampling_strategy == "fixed"
    assert config.league.fixed_opponents == ("google/gemini-2.0-flash-lite-001",)


def test_every_line_with_rays_words_names_the_line_to_write():
    after = names_after_all_but_train()
    of_ray = {ast.unparse(line): run(line, dict(after)) for line in lines() if ".remote(" in ast.unparse(line)}
    assert len(of_ray) == 11
    for line, message in of_ray.items():
        assert "no part of a run is an actor of Ray's; write " in message, line
        called = message.partition("write ")[2].partition("(")[0]
        assert f"{called}." in line
    assert "add_fixed(name='google/gemini-2.0-flash-lite-001')" in str(of_ray)


def test_script_that_still_starts_ray_is_refused_at_its_first_part(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    unstable.Tracker(run_name="test")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(ConfigError, match=r"ray\.init: .* remove each line"):
        unstable.Tracker(run_name="test")


def test_learner_of_the_script_takes_the_arguments_of_a2c(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    names = names_after_all_but_train()
    buffer = unstable.EpisodeBuffer(max_buffer_size=64, tracker=names["tracker"])
    shared = {"tracker": names["tracker"], "buffer": buffer}
    collector = unstable.Collector(vllm_config={}, game_scheduler=names["game_scheduler"], **shared)
    sizes = {"batch_size": 32, "mini_batch_size": 1, "learning_rate": 1e-5, "grad_clip": 0.2}
    learner = unstable.A2CLearner(
        model_name="builtin:tiny", lora_cfg={}, model_registry=names["model_registry"], **sizes, **shared
    )
    learner.initialize_algorithm(
        infer_mini_batch_size=32, critic_learning_rate=2e-5, normalize_adv=False, max_train_len=3000
    )
    with pytest.raises(ConfigError, match="call `collect` before"):
        learner.train(1)
    collector.collect(num_train_workers=8)
    config = build_script(learner.given).plan.config
    assert (config.algorithm, config.buffer.kind) == ("a2c", "episodes")
    assert config.learner.critic_learning_rate == 2e-5
    assert (config.learner.normalize_adv, config.learner.max_train_len) == (False, 3000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: unstable.Tracker(run_name="a", wandb_projct="b"), "Tracker: .* 'wandb_projct'"),
        (lambda: unstable.Collector(vllm_config={}), "Collector: missing a required argument: 'tracker'"),
        (lambda: unstable.REINFORCELearner(model_name="a", grad_clip=0.2), "Learner: missing .*: 'lora_cfg'"),
        (lambda: unstable.TrainEnvSpec("E", 2, 1, "x"), r"'E', num_players=2, num_actors=1, prompt_template='x'\)"),
        (lambda: unstable.EvalEnvSpec("E", 2, "x", fixed_opponent="base"), "'x', fixed_opponent='base'"),
    ],
)
def test_wrong_call_of_the_script_is_refused_with_the_reason(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "part", ["ModelRegistry", "StepBuffer", "EpisodeBuffer", "GameScheduler", "Tracker", "Collector"]
)
def test_unknown_keyword_is_refused_as_ever(part):
    with pytest.raises(TypeError, match="trackr"):
        getattr(unstable, part)(trackr=None)
