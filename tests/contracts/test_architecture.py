"""Rules of DESIGN.md for the code itself."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import unstable_lite

PACKAGE = Path(unstable_lite.__file__).parent
REFERENCE_NAMES = {
    "build", "Collector", "StepBuffer", "EpisodeBuffer", "REINFORCELearner", "Tracker", "ModelRegistry",
    "GameScheduler", "TerminalInterface", "TrainEnvSpec", "EvalEnvSpec",
}  # fmt: skip


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "transformers", "numpy", "pydantic", "textarena", "rich", "zmq"}
    assert not heavy & _loaded_after("import unstable_lite")


def test_orchestrator_chooses_engines_and_plays_without_heavy_libraries_and_word_lists():
    """Only word games load the lists."""
    choose = "from unstable_lite.engines.devices import choose_engine, resolve_devices"
    modules = "import unstable_lite.cli.app, unstable_lite.api, unstable_lite.tracking.tensorboard"
    play = "from unstable_lite.games.environments import Environment; Environment('TicTacToe-v0-train', 2, 0).observe()"
    loaded = _loaded_after(f"{choose}\n{modules}\nchoose_engine('auto', resolve_devices('auto', 'auto')[0])\n{play}")
    assert "unstable_lite.orchestrator.run" in loaded
    assert not {"torch", "transformers", "peft", "vllm", "nltk"} & loaded
    assert "nltk" in _loaded_after("from textarena.envs.utils.word_lists import EnglishDictionary")


def test_names_of_the_reference_are_public():
    assert REFERENCE_NAMES <= set(unstable_lite.__all__)
    for name in unstable_lite.__all__:
        assert getattr(unstable_lite, name).__name__ == name
    assert unstable_lite.samplers.UniformRandomEnvSampler
    assert unstable_lite.reward_transformations.RoleAdvantageByEnvFormatter
    assert {*unstable_lite.__all__, "samplers", "reward_transformations", "errors"} <= set(dir(unstable_lite))


def test_imports_point_down():
    lint = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert lint.returncode == 0, lint.stdout


@functools.cache
def _nodes() -> list[tuple[Path, ast.AST]]:
    """Return every node of the package's modules with its file."""
    return [(path, node) for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]


def test_all_exceptions_are_caught_only_at_outermost_frames():
    catch_all = []
    for path, node in _nodes():
        if isinstance(node, ast.ExceptHandler):
            names = ast.unparse(node.type) if node.type else "everything"
            if names in ("Exception", "BaseException", "everything"):
                catch_all.append(str(path.relative_to(PACKAGE)))
    foreign_code = ["games/env_catalogue.py", "games/env_worker.py", "models/__init__.py", "plugins.py"]
    assert sorted(catch_all) == sorted([*foreign_code, "orchestrator/run.py", "transport/worker_main.py"])


def test_nothing_is_unpickled_and_no_text_is_run_as_code():
    """The contents of files are data: no module has a way to run them."""
    forbidden_modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "runpy"}
    forbidden_calls = {
        "eval", "exec", "compile", "torch.load", "torch.save", "np.load", "numpy.load", "np.save", "torch.jit.load",
        "code.interact", "os.system",
    }  # fmt: skip
    found = []
    for path, node in _nodes():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module.partition(".")[0]]
        if forbidden_modules & set(names):
            found.append(f"{path}:{node.lineno} imports {names}")
        if isinstance(node, ast.Call) and (call := ast.unparse(node.func)) in forbidden_calls:
            found.append(f"{path}:{node.lineno} calls {call}")
        options = ("allow_pickle", "True"), ("shell", "True")
        if isinstance(node, ast.keyword) and (node.arg, ast.unparse(node.value)) in options:
            found.append(f"{path}:{node.value.lineno} {node.arg}")
    assert found == []


def test_every_hub_load_states_if_it_trusts_remote_code():
    silent = []
    for path, node in _nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".from_pretrained", ".from_config")):
            given = {keyword.arg for keyword in node.keywords}
            unpacked = {ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None}
            if "trust_remote_code" not in given and "trust" not in unpacked:
                silent.append(f"{path}:{node.lineno}")
    assert silent == []


def test_no_module_has_a_catch_all_name():
    names = {path.stem for path in PACKAGE.rglob("*")}
    assert not {"utils", "helpers", "manager", "misc", "common"} & names


def test_every_module_has_a_docstring():
    silent = [path for path, one in _nodes() if isinstance(one, ast.Module) and one.body and not ast.get_docstring(one)]
    assert silent == []


def test_files_functions_and_the_root_stay_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 10
    assert (PACKAGE / "orchestrator/train_loop.py").read_text().count("\n") <= 120, "the loop is one page"
    assert not [path for path in PACKAGE.rglob("*.py") if path.read_text().count("\n") > 400]
    functions = [node for _, node in _nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long_functions = [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 40]
    assert len(long_functions) <= 15, long_functions


def test_results_have_one_text_and_one_interval():
    """Views take them from result rows. Metrics of training, ratings and scored answers have formats of their own."""
    text, interval = re.compile(r"\.\d%|100 \* "), re.compile(r"wilson_interval|Z_95|\bstdev\b|math\.sqrt")
    texts = {"intervals.py", "result_rows.py", "displayed_metrics.py", "alarms.py", "app.py"}
    intervals = {"intervals.py", "evaluations.py", "ladder.py", "probing.py"}
    for folder in ("cli", "dashboards", "evaluation", "orchestrator", "sharing", "tracking"):
        for path in (PACKAGE / folder).rglob("*.py"):
            source = path.read_text()
            assert path.name in texts or not text.search(source), f"{path} writes a share itself"
            assert path.name in intervals or not interval.search(source), f"{path} computes an interval itself"
    script = (PACKAGE / "dashboards/report/page.js").read_text()
    assert not re.search("wilson|sqrt|student", script, re.IGNORECASE)
    template = (PACKAGE / "dashboards/report/page.html.jinja").read_text()
    assert not text.search(re.sub(r'style="[^"]*"', "", template))
