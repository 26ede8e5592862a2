"""Every block of README.md and docs/*.md is run, or states why it cannot be.

A block is one of: commands (`bash`), each run as written or checked as far as a test can; a config or a part of one
(`toml`), validated as `check` does; a sweep of W&B (`yaml`), whose first command is checked; code (`python`), which is
run, or starts with `# from FILE` and is an excerpt of a separately tested file, or starts with `# UnstableBaselines`
and belongs to that project; output of a program (`text`).
A block that needs a GPU has a comment about it, and is still checked. A first line `# NAME.toml` or `# NAME.py` makes
the block a file for the blocks below it.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from bench.study.reading import FOR_A_CLAIM
from fakes import numpy_learner, runs
from fakes.wandb_runs import agent_command
from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.config.reading import drop_removed, parse_config
from unstable_lite.config.tracking import AlarmsConfig
from unstable_lite.orchestrator.checkpoint import newest_checkpoint
from unstable_lite.planning.plan import load_plan
from unstable_lite.sft.session import load_sft_plan

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = Path("outputs/2026-11-21/12-00-00-mine")
"""The name of a run on the pages."""
ON_CPU = ('engine.devices=["cpu"]', 'learner.devices=["cpu"]')
GPU = re.compile(r"#.*\bneeds (a GPU|GPUs)\b")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
STUDIES = sorted((ROOT / "bench" / "results" / "studies").glob("*.json"))
ENV = '\n[[train_envs]]\nenv_id = "Nim-v0-train"\nnum_players = 2\nnum_actors = {}\n'


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def file_name(self) -> str | None:
        named = re.fullmatch(r"# (\w+\.(?:toml|py))", self.first_line)
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.M | re.S))
    assert text.count("```") == 2 * len(found), f"{page.name}: a block has no end, or a different start"
    return [Block(one[2], textwrap.dedent(one[3]), text.count("\n", 0, one.start()) + 1) for one in found]


@pytest.fixture(scope="module")
def run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of a run whose later games use the scripted engine, without a model."""
    copy = shutil.copytree(finished_run, tmp_path_factory.mktemp("docs") / "run", symlinks=True)
    config = (copy / "config.toml").read_text().replace('kind = "transformers"', 'kind = "scripted"')
    (copy / "config.toml").write_text(config.replace("max_model_len = 512", "max_model_len = 4096"))
    return copy


@pytest.fixture
def workplace(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the directory for the pages' commands, with the repository's examples and two runs."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in (RUN, RUN.with_name("13-00-00-another")):
        shutil.copytree(run, tmp_path / name, symlinks=True)
        shutil.copytree(run / "checkpoints" / "ckpt-2", tmp_path / name / "checkpoints" / "ckpt-20")  # as on the pages
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENROUTER_API_KEY", "not called by a check")
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=() if page == ROOT / "README.md" else pytest.mark.nightly)
        for page in PAGES
    ],
)
def test_every_block_of_a_page_runs_or_states_its_needs(page, workplace, monkeypatch):
    for path in (ROOT / "examples", workplace):
        monkeypatch.syspath_prepend(path)
    numpy_learner.use(monkeypatch)
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        needs_gpu = GPU.search(block.first_line) is not None
        if block.file_name:
            Path(block.file_name).write_text(block.text)
        if block.language == "bash" and block.first_line.startswith("for "):
            _loop(block.text, where)
        elif block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                _command(line, where, monkeypatch)
        elif block.language == "toml":
            _config(block.text, needs_gpu, where)
        elif block.language == "python":
            _code(block, where)
        elif block.language == "yaml":
            sweep = yaml.safe_load(block.text)
            first = {name: allowed["values"][0] for name, allowed in sweep["parameters"].items()}
            _run(agent_command(sweep, first), needs_gpu, where)
        else:
            assert block.language == "text", f"{where}: a block of {block.language!r} is neither run nor marked"


def _config(text: str, needs_gpu: bool, where: str) -> None:
    """Check a config; a part of a config is completed by an env."""
    path = Path("checked.toml")
    config = tomllib.loads(text)
    has_opponents = "policies" in config or "opponent_sampling_strategy" in config.get("league", {})
    path.write_text(text + ENV.format(1 if has_opponents else 2) * ("train_envs" not in config))
    assert load_plan(path, ON_CPU if needs_gpu else ()).describe(), where


def _code(block: Block, where: str) -> None:
    first, _, rest = block.text.partition("\n")
    if excerpt := re.fullmatch(r"# from (\S+)", first):
        assert rest.strip() in (ROOT / excerpt[1]).read_text(), f"{where}: {excerpt[1]} has other lines"
    elif first.startswith("# UnstableBaselines"):
        ast.parse(rest)
    elif not GPU.search(first):
        exec(compile(block.text, where, "exec"), {"__name__": "__main__"})


def _loop(text: str, where: str) -> None:
    """Run a loop of the shell, with small runs."""
    few = "run.learning_steps=1 run.eval_games=2 run.num_eval_workers=0 learner.batch_size=12"
    small = re.sub(r"^ *python -m unstable_lite run .*$", rf"\g<0> {few}", text, flags=re.M)
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-euc", small], capture_output=True, text=True, env={**os.environ, "PATH": own})
    assert done.returncode == 0, where + done.stdout + done.stderr


def _command(line: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_gpu = GPU.search(line) is not None
    for part in re.split(r"&&", line.partition(" #")[0]):
        words = shlex.split(part, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            if name == "PYTHONPATH":
                monkeypatch.syspath_prepend(value)
            else:
                monkeypatch.setenv(name, value)
        words = [path for word in words for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
        if words:
            _run(words, needs_gpu, f"{where}: {line}")


def _run(words: list[str], needs_gpu: bool, where: str) -> None:
    match words:
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            wanted = re.findall(r"[\w-]+(?=[,\]])", " ".join(packages))
            assert set(wanted) <= set(extras), where
        case ["ln", "-s", target, name]:
            Path(name).symlink_to(target)
        case ["pytest"]:
            assert (ROOT / "tests").is_dir()
        case ["python", "-m", "bench", name, *_]:
            assert (ROOT / "bench" / f"{name}.py").is_file() or (ROOT / "bench" / name).is_dir(), where
        case ["python", "-m", module, *_] if module.startswith("bench."):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), where
        case ["python", script, *_] if script.startswith(("examples/", "docs/", "tests/")):
            assert (ROOT / script).exists(), f"{where}: no such script"
        case ["tensorboard", "--logdir", directory]:
            assert Path(directory).is_dir(), where
        case ["python", "-m", "unstable_lite", *arguments] | ["unstable-lite", *arguments]:
            _unstable(arguments, needs_gpu, where)
        case _:
            assert needs_gpu, f"{where}: neither run nor marked"


def _unstable(arguments: list[str], needs_gpu: bool, where: str) -> None:
    on_cpu = ON_CPU if needs_gpu else ()
    match arguments:
        case ["run", "--resume", directory, *overrides]:
            assert newest_checkpoint(Path(directory) / "checkpoints", print), where
            load_plan(Path(directory) / "config.toml", tuple(overrides))
        case ["run", config, *overrides]:
            assert not [word for word in overrides if word.startswith("-") and word != "--quiet"], where
            load_plan(Path(config), _without_paths(overrides, on_cpu))
        case ["sft", config, *rest]:
            assert load_sft_plan(Path(config), tuple(word for word in rest if not word.startswith("-"))), where
        case ["worker", *_]:
            code, out, err = runs.run(*arguments, "--patience", "1")
            assert (code, "1 s" in err) == (1, True), where + out + err
        case ["push", *rest] if "--dry-run" not in rest:
            _unstable(["push", *rest, "--dry-run", f"uploaded-{len(rest)}"], needs_gpu, where)
        case ["play", *rest] if "--watch" not in rest:
            done = subprocess.run(runs.command("play", *rest), input="[0 1]\n" * 50, capture_output=True, text=True)
            assert done.returncode == 0, where + done.stdout + done.stderr
        case _:
            few = {"eval": ["--games", "2"], "check": [*on_cpu]}.get(arguments[0], [])
            if "--exact" in arguments:
                few = ["--samples", "4"] * ("--samples" in arguments)
            done = CliRunner().invoke(app, [*arguments, *few], catch_exceptions=False)
            assert done.exit_code == 0, where + done.output


def _without_paths(overrides: list[str], on_cpu: tuple[str, ...]) -> tuple[str, ...]:
    """Remove paths that an earlier command of the page would have made, because they do not exist here."""
    return *(word for word in overrides if not word.startswith("lora.initial_lora_path=warm_start")), *on_cpu


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_has_a_target(page):
    for target in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", page.read_text()):
        path, _, anchor = "".join(target).partition("#")
        if path.startswith("http"):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {path}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            anchors += re.findall(r'<a id="([\w-]+)"></a>', there.read_text())
            assert anchor in anchors, f"{page.name} links to {path}#{anchor}"


def test_metrics_have_an_anchor_for_each_alarm_that_judges_them():
    anchors = re.findall(r'<a id="alarm-(\w+)"></a>', (ROOT / "docs" / "curves.md").read_text())
    assert sorted(anchors) == sorted(AlarmsConfig.model_fields)


def test_config_page_matches_the_models():
    done = subprocess.run([sys.executable, ROOT / "docs" / "config_reference.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "docs" / "config.md").read_text(), "python docs/config_reference.py > docs/config.md"
    keys = re.findall(r"^### `([\w.]+)`\n\n(.*)$", done.stdout, re.M)
    assert not [key for key, text in keys if not text.partition(".* ")[2]], "these keys have no docstring"
    assert len({key.replace(".", "") for key, _ in keys}) == len(keys), "the anchors of two keys are the same"
    sections = re.findall(r"^## `\[+(\w+)", done.stdout, re.M)
    assert set(Config.model_fields) <= {*sections, *(key for key, _ in keys)}


def test_every_metric_named_on_a_page_is_recorded(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    recorded = {name for line in lines for name in json.loads(line)}
    sources = "\n".join(path.read_text() for path in (ROOT / "unstable_lite").rglob("*.py"))
    named = re.findall(
        r"`((?:collection|evaluation|learner|inference|exploration|run|buffer|alarms|batch|league|"
        r"opponents|transport|trueskill)[^`/]*/[^`]+)`",
        (ROOT / "docs" / "curves.md").read_text(),
    )
    assert len(named) > 40
    for name in named:
        if name.endswith("…"):
            continue
        whole = name.replace("{env}", "Nim-v0-train").replace("{opponent}", "scripted:random").replace("{i}", "0")
        own = name.rpartition("/")[2].removeprefix("groups_")
        is_known = whole in recorded or f'"{name}"' in sources or f'"{own}"' in sources
        assert is_known, f"docs/curves.md names {name}"


def test_every_recorded_metric_is_named_in_curves(run):
    assert runs.undocumented_metrics(run) == []


def test_readme_has_both_commands_on_its_first_screen():
    first_screen = PAGES[0].read_text().splitlines()[:25]
    assert any(
        "pip install -e '.[cpu]' && python -m unstable_lite run examples/quickstart.toml" in x for x in first_screen
    )
    assert any("pip install -e '.[cpu,test]' && pytest" in x for x in first_screen)


def test_gpu_recipe_is_the_quick_start_of_the_reference():
    """Mirror self-play of Qwen3-1.7B on SimpleTak, evaluated there and on KuhnPoker, on three GPUs."""
    plan = load_plan(ROOT / "examples" / "selfplay_gpu.toml", (*ON_CPU, "eval_envs=[]"))
    assert plan.config.model_name == "Qwen/Qwen3-1.7B-Base"
    (spec,) = plan.config.train_envs
    assert (spec.env_id, spec.num_actors, spec.num_players) == ("SimpleTak-v0-train", 2, 2)
    raw = tomllib.loads((ROOT / "examples" / "selfplay_gpu.toml").read_text())
    assert (raw["learner"]["devices"], raw["engine"]["devices"]) == ([0], [1, 2])
    assert [spec["env_id"] for spec in raw["eval_envs"]] == ["SimpleTak-v0-train", "KuhnPoker-v0-train"]


@pytest.mark.nightly
@pytest.mark.browser
def test_pictures_are_made_from_a_run(run, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "pictures.py", run],
        capture_output=True,
        text=True,
        env={**os.environ, "PICTURES": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"top.svg", "report.png", "games.png"}
    assert " running " in re.sub(r"&#160;|<[^>]*>", " ", (tmp_path / "top.svg").read_text())
    for name in ("report.png", "games.png"):  # two pixels a pixel of the page
        with Image.open(tmp_path / name) as made, Image.open(ROOT / "docs" / "pictures" / name) as kept:
            assert made.size == kept.size
    sizes = [(ROOT / "docs" / "pictures" / path.name).stat().st_size for path in tmp_path.iterdir()]
    assert max(sizes) < 300_000


def test_tests_that_guard_the_invariants_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 10
    for path, name in named:
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_row_of_a_study_is_published():
    published = {row for path in STUDIES for row in path.with_suffix(".md").read_text(encoding="utf-8").splitlines()}
    tables = re.findall(r"^\| measure \|.*\n(?:\|.*\n)+", RESULTS, re.MULTILINE)
    assert tables
    assert not [row for table in tables for row in table.splitlines() if row not in published]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_published_study_is_whole_small_and_on_the_page(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    runs = {(run["arm"], run["seed"]) for run in content["runs"]}
    study = content["study"]
    assert runs == {(arm["name"], seed) for arm in study["arms"] for seed in study["seeds"]}
    assert len(study["seeds"]) >= FOR_A_CLAIM
    assert all(run["measures"].get(study["primary"]) is not None for run in content["runs"])
    assert path.stat().st_size < 2_000_000
    for config in content["configs"].values():
        drop_removed(config)
        _, problems = parse_config(config)
        assert not problems, "the study cannot be continued or shown"
    assert f"examples/studies/{path.stem}.toml" in RESULTS and f"bench/results/studies/{path.stem}.json" in RESULTS
    assert (ROOT / "examples" / "studies" / f"{path.stem}.toml").exists()


def test_scale_page_has_exactly_the_tables_that_the_bench_prints():
    from bench import plan  # imports torch

    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    section = page.partition("\n## Engines of a learner rank\n")[2].partition("\n## ")[0]
    for table in plan.tables():
        assert f"\n\n{table}\n\n" in section, "copy the tables of `python -m bench scale`"
        section = section.replace(table, "")
    assert "|" not in section and "```" not in section, "the page has a table that the bench does not print"
