"""Environments of the package `verifiers` as envs, by examples/verifiers_env.py: real ones, and real runs."""

import asyncio
import gc
import importlib
import random
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fakes import runs
from unstable_lite.errors import ConfigError, EnvError
from unstable_lite.files import read_records
from unstable_lite.games.environments import Environment
from unstable_lite.games.local_game import hang_guard

EXAMPLES = Path(__file__).parents[3] / "examples"
ENV_ID = "verifiers_env:Verifiers-v0"
OWN_ENVIRONMENTS = """
import asyncio
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)])
CLEANED = []


def right(parser, completion, answer):
    return float(parser.parse_answer(completion) == answer)


async def short(completion):
    return float(len(completion[-1].content) < 40)


def compared(states):
    return [0.0] * len(states)


def add(a: int, b: int) -> int:
    "Return the sum."
    return a + b


class Odd(vf.MultiTurnEnv):
    def __init__(self, kind, **arguments):
        self.kind = kind
        super().__init__(**arguments)

    async def env_response(self, messages, state, **kwargs):
        if self.kind == "error":
            raise vf.Error("the sandbox is gone")
        if self.kind == "crash":
            raise KeyError("no such room")
        if self.kind == "hang":
            await asyncio.sleep(3600)
        if self.kind == "image":
            return [vf.UserMessage(content=[{"type": "image_url", "image_url": {"url": "data:"}}])]
        return [vf.UserMessage(content=[{"type": "text", "text": "Once more."}])]

    @vf.cleanup
    async def note_cleanup(self, state):
        CLEANED.append(state["answer"])


def load_environment(kind="single"):
    parser = vf.XMLParser(["answer"], answer_field="answer")
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.25], parser=parser)
    if kind == "single":
        shots = [{"role": "user", "content": "9 + 1?"}, {"role": "assistant", "content": "<answer>10</answer>"}]
        prompt = {"system_prompt": "Answer in <answer> tags.", "few_shot": shots}
        rows = {"dataset": ROWS, "eval_dataset": ROWS.select([7])}
        return vf.SingleTurnEnv(**rows, **prompt, rubric=rubric, parser=parser)
    if kind == "tools":
        return vf.ToolEnv(dataset=ROWS, tools=[add], rubric=rubric)
    if kind == "judge":
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.JudgeRubric())
    if kind == "compared":
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[compared]))
    if kind == "group":
        return vf.EnvGroup([load_environment(), load_environment()])
    return Odd(kind, dataset=ROWS, rubric=rubric, parser=parser, max_turns=2)
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make the modules of examples/ and `own_world`, a module with environments, importable; return the latter."""
    (tmp_path / "own_world.py").write_text(OWN_ENVIRONMENTS)
    for path in (EXAMPLES, tmp_path):
        monkeypatch.syspath_prepend(path)
    sys.modules.pop("own_world", None)
    importlib.import_module("verifiers_env")._load.cache_clear()
    yield importlib.import_module("own_world")


def game(kind: str, seed: int = 0, **arguments: object) -> Environment:
    return Environment(ENV_ID, 1, seed, env_kwargs=tuple({"name": "own_world", "kind": kind, **arguments}.items()))


def row_of(seed: int, num_rows: int) -> int:
    return random.Random(seed).randrange(num_rows)


def test_missing_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "verifiers_env", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"^verifiers_env: .*verifiers.*; pip install 'unstable-lite\[verifiers\]'"):
        importlib.import_module("verifiers_env")


@pytest.mark.verifiers
def test_reward_of_one_turn_is_the_rubrics(world: ModuleType) -> None:
    seen = set()
    for seed in range(30):
        number = row_of(seed, 8)
        for text, reward in (
            (f"<answer>{number + 1}</answer>", 1.25),
            (f"{number + 1}", 0.25),
            (f"It is {'very ' * 9}certainly <answer>{number + 1}</answer>", 1.0),
        ):
            env = game("single", seed)
            assert env.observe() == (
                0,
                f"Answer in <answer> tags.\n\n9 + 1?\n\n[your answer] <answer>10</answer>\n\n{number} + 1?",
            )
            assert env.play(text) is None
            rewards, remarks = env.close()
            assert rewards == {0: reward}
            assert remarks[0]["metrics"]["right"] == (reward >= 1)
            seen.add(number)
    assert seen == set(range(8))
    assert game("single", eval_dataset=True).observe()[1].endswith("7 + 1?")


@pytest.mark.verifiers
def test_turns_show_the_dialogue_and_end_as_the_environment_says(world: ModuleType) -> None:
    env = game("plain", seed=3)
    question = f"{row_of(3, 8)} + 1?"
    assert env.observe() == (0, question)
    assert env.play("Hm.") == (0, f"{question}\n\n[your answer] Hm.\n\nOnce more.")
    assert env.play("<answer>x</answer>") is None
    rewards, remarks = env.close()
    assert (rewards, remarks[0]["reason"]) == ({0: 0.25}, "max_turns_reached")
    assert world.CLEANED == [str(row_of(3, 8) + 1)]


@pytest.mark.verifiers
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("tools", "it has tools"),
        ("judge", "its rubric asks a model to judge"),
        ("compared", "its rubric compares rollouts"),
        ("group", "it is neither a MultiTurnEnv nor a SingleTurnEnv"),
        ("absent", "Could not import 'absent'"),
    ],
)
def test_unsuitable_environment_is_refused_with_the_reason(
    kind: str, reason: str, world: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not called")
    with pytest.raises(ValueError, match=reason):
        game(kind, name="absent") if kind == "absent" else game(kind)


@pytest.mark.verifiers
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("error", "the rollout failed: .*the sandbox is gone"),
        ("crash", "no such room"),
        ("image", "a prompt has an image"),
    ],
)
def test_error_of_an_environment_ends_only_its_game(kind: str, error: str, world: ModuleType) -> None:
    env = game(kind)
    with pytest.raises(EnvError, match=error) as caught:
        env.play("1")
    assert caught.value.reason == ("env_failed" if kind == "error" else "env_raised")
    assert game("single").play("1") is None


@pytest.mark.verifiers
def test_environment_that_hangs_is_interrupted_and_cleaned_up(world: ModuleType) -> None:
    env = game("hang", seed=5)
    with hang_guard(1.0), pytest.raises(EnvError, match="did not return within"):
        env.play("1")
    assert world.CLEANED == []
    del env
    gc.collect()
    runs.wait_for(lambda: world.CLEANED == [str(row_of(5, 8) + 1)])


@pytest.mark.verifiers
def test_signals_stay_with_the_run(world: ModuleType) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    assert game("plain").observe()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.verifiers
@pytest.mark.timeout(600)
def test_run_from_the_example_trains_on_the_rubrics_rewards(
    world: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the example's config, with a second environment whose games run in another process."""
    text = (EXAMPLES / "verifiers.toml").read_text()
    (env,) = re.findall(r"^\[\[train_envs\]\].*?(?=\n\n)", text, re.S | re.M)
    own = re.sub(r"env_kwargs = .*", 'env_kwargs = { name = "own_world" }\nisolated = true', env)
    own = own.replace(ENV_ID, "own_world:Sums-v0")
    (tmp_path / "own_world.py").write_text(
        OWN_ENVIRONMENTS
        + textwrap.dedent("""
            import textarena as ta
            ta.envs.registration.register(id="Sums-v0", entry_point="verifiers_env:VerifiersEnv")
        """)
    )
    path = tmp_path / "both.toml"
    path.write_text(text.replace("[[eval_envs]]", f"{own}\n\n[[eval_envs]]"))
    few = ("run.learning_steps=2", "run.eval_games=4", "run.num_collection_workers=12", "learner.batch_size=24")
    # The process of isolated games imports verifiers in its first call.
    patient = ("run.env_timeout_s=200",)
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{tmp_path}:{':'.join(sys.path)}")
    started = runs.start("run", path, *few, *patient, f"run.output_dir={tmp_path}/outputs")
    runs.output_of(runs.finish(started, timeout_s=580))
    games = [*read_records(runs.run_directory(tmp_path) / "games.jsonl")]
    guess = importlib.import_module("verifiers_guess").load_environment()
    single = world.load_environment()
    for one in games:
        environment, num_rows = (guess, 9) if one["env_id"] == ENV_ID else (single, 8)
        assert one["rewards"]["0"] == pytest.approx(scored(environment, row_of(one["seed"], num_rows), one["turns"]))
    assert {one["env_id"] for one in games if one["kind"] == "train"} == {ENV_ID, "own_world:Sums-v0"}
    assert sum(one["kind"] == "eval" for one in games) == 8
    assert any(0 < one["rewards"]["0"] for one in games)


def scored(environment: object, row: int, turns: list[list[object]]) -> float:
    """Return the reward of verifiers itself for these answers, without our client and loop."""
    vf = importlib.import_module("verifiers")
    types = importlib.import_module("verifiers.types")
    answers = iter([turn[2] for turn in turns])

    class Recorded(vf.OpenAIChatCompletionsClient):
        async def get_response(self, prompt: object, **_: object) -> object:
            message = types.ResponseMessage(content=next(answers), finish_reason="stop", is_truncated=False)
            return types.Response(id="", created=int(time.time()), model="", message=message)

    output = asyncio.run(environment.run_rollout(environment.get_dataset()[row], Recorded(None), "", {}))
    assert next(answers, None) is None, "the environment would have ended the game earlier"
    return float(output["reward"])
