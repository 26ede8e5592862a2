"""examples/quickstart.ipynb is run as a person runs it: installed by its own cell, in a kernel, with typed moves."""

import ast
import asyncio
import base64
import contextlib
import gzip
import html
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
SMALL = {"updates = 120": "updates = 3", "batch_size = 384": "batch_size = 32", "eval_games = 200": "eval_games = 4"}
LONG = SMALL | {"updates = 120": "updates = 100_000"}


@dataclass(frozen=True)
class Place:
    """A new checkout, and a new environment with what the tests' own has, but for unstable_lite."""

    folder: Path
    python: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("notebook")
    checkout = root / "checkout"
    (checkout / "examples").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    shutil.copytree(ROOT / "unstable_lite", checkout / "unstable_lite", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    (site,) = (root / "venv" / "lib").glob("*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its .pth files are not read
    return Place(checkout / "examples", root / "venv" / "bin" / "python")


class Person(NotebookClient):
    """A front end at which a person types the same move whenever the notebook asks for one."""

    def cell(self, name: str) -> Any:
        (found,) = (cell for cell in self.nb.cells if cell["id"] == name)
        return found

    async def run_cell(self, name: str) -> Any:
        cell = self.cell(name)
        await self.async_execute_cell(cell, self.nb.cells.index(cell))
        return cell

    async def value(self, expression: str) -> str:
        """Return what the kernel prints for an expression."""
        self.nb.cells.append(nbformat.v4.new_code_cell(f"print({expression})"))
        cell = await self.async_execute_cell(self.nb.cells[-1], len(self.nb.cells) - 1)
        return text_of(cell)

    async def type_moves(self) -> None:
        while True:
            await self.kc.get_stdin_msg(timeout=None)
            self.kc.input("0 1")


@contextlib.asynccontextmanager
async def opened(place: Place, numbers: dict[str, str]) -> AsyncIterator[Person]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assert parameters.source == "\n".join(numbers)
    parameters.source = "\n".join(numbers.values())
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = str(place.python)
    person = Person(
        notebook, km=manager, timeout=None, startup_timeout=600, resources={"metadata": {"path": str(place.folder)}}
    )
    play = person.cell("play")
    play.source = play.source.replace("]", ', "--seat", "0"]', 1)  # the person moves first, and so has a turn
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    async with person.async_setup_kernel(env=environment, cleanup_kc=True):
        person.kc.allow_stdin = True
        typing = asyncio.create_task(person.type_moves())
        try:
            yield person
        finally:
            typing.cancel()


def text_of(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert [cell["id"] for cell in code if cell.outputs or cell.execution_count] == []


@pytest.fixture(scope="module")
def executed(place: Place) -> Any:
    """Return the notebook after all of its cells, with `lengths`, the numbers of points of each line in the curve."""

    async def execute() -> Any:
        async with opened(place, SMALL) as person:
            for cell in person.nb.cells[:]:
                await person.async_execute_cell(cell, person.nb.cells.index(cell))
            lengths = "{line.get_label(): len(line.get_xdata()) for line in axes.lines}"
            person.nb["lengths"] = await person.value(lengths)
            return person.nb

    return asyncio.run(execute())


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_cells_of_the_notebook_run_in_a_new_environment(executed, place):
    cells = {cell["id"]: cell for cell in executed.cells}
    (installed,) = place.python.parents[1].glob("lib/*/site-packages/unstable_lite/api.py")
    assert installed.is_file()
    assert not [cell["id"] for cell in executed.cells for output in cell.get("outputs", ()) if "ename" in output]

    lengths = ast.literal_eval(executed["lengths"])
    assert lengths["training games"] >= 2
    assert lengths["evaluations"] == 2, "before and after"
    (picture,) = (output for output in cells["curve"].outputs if "image/png" in output.get("data", ()))
    assert len(base64.b64decode(picture.data["image/png"])) > 5_000

    assert re.search(r"^before .*\nafter ", text_of(cells["summary"]), re.M)
    assert text_of(cells["play"]).count("your turn") >= 1
    assert re.search(r"player \d, you: (win|loss)", text_of(cells["play"]))

    games, games_read = map(int, re.findall(r"(\d+) of (\d+) games", text_of(cells["report"]))[0])
    assert 0 < games <= games_read
    page = (place.folder / "report.html").read_bytes()
    shown = report_output(executed)
    assert len(shown) < 3_000_000, "Jupyter's server drops outputs of more"
    (packed,) = re.findall(r'atob\("([^"]+)"\)', html.unescape(shown))
    assert gzip.decompress(base64.b64decode(packed)) == page
    assert len(page) > 1_000_000 and b"Nim-v0-train" in page


def report_output(notebook: Any) -> str:
    (cell,) = (cell for cell in notebook.cells if cell["id"] == "report")
    (output,) = (output for output in cell.outputs if output.output_type == "execute_result")
    return str(output.data["text/html"])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_run_survives_an_interrupted_cell_and_ends_with_the_kernel(place):
    others = {*place.folder.glob("outputs/*/*/live.json")}
    async with opened(place, LONG) as person:
        for name in ("install", "parameters", "build", "start"):
            await person.run_cell(name)
        drawing = asyncio.create_task(person.run_cell("curve"))
        while not (person.cell("curve").outputs and {*place.folder.glob("outputs/*/*/live.json")} - others):
            await asyncio.sleep(0.5)
        await person.km.interrupt_kernel()
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            await drawing
        assert await person.value("run.is_over") == "False\n"
        kernel = psutil.Process(int(await person.value("__import__('os').getpid()")))
        workers = kernel.children(recursive=True)
        assert len(workers) >= 2, "an engine and a learner"
    assert psutil.wait_procs([kernel, *workers], timeout=60)[1] == []
