"""Pictures of the docs, all from one run of the quickstart: `python docs/pictures.py RUN`.

- report.png: the first screen of its report
- games.png: the games of its report, with the tokens of an answer
- top.svg: the dashboard while it was running: of a copy that ends at four fifths of the updates and whose process is
  this one

The first two are of a headless Chromium (Debian's `chromium`; playwright and pillow come with the extra `test`). The
pictures are written to docs/pictures, or to the folder in the environment variable PICTURES.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from unstable_lite.dashboards.report import write_report
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.dashboards.top import MachineLoad, draw

PICTURES = Path(os.environ.get("PICTURES", Path(__file__).parent / "pictures"))
TOP_SIZE = (100, 30)
REPORT_SIZE = {"width": 1080, "height": 1000}
SCALE = 2
"""Pixels of a picture per pixel of a page, so that it is sharp on every screen."""
NO_PROCESS = 2**31 - 1
WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
"""Template of a picture that loads nothing: rich's own template asks a server for its font."""


def running_copy(run: Path, copy: Path) -> Path:
    """Write the records of a run up to four fifths of its updates, as they are while it runs."""
    ended = RunDirectory(run)
    ended.refresh()
    update = max(1, ended.num_updates * 4 // 5)
    copy.mkdir()
    for name in ("config.toml", "versions.json"):
        shutil.copy(run / name, copy)
    for name in ("metrics", "league", "eval", "alarms"):
        lines = [json.dumps(line) + "\n" for line in ended.lines(name) if line["step"] <= update]
        (copy / f"{name}.jsonl").write_text("".join(lines))
    made = next(line for line in ended.updates() if line["step"] == update)
    (copy / "live.json").write_text(json.dumps(ended.live | _live_values(ended.live, made)))
    return copy


def _live_values(live: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Return the values of live.json after an update, from the metrics of this update."""
    workers = []
    for worker in live["workers"]:
        name = f"inference/{worker['name']}"
        stats = worker["stats"]
        if stats:
            running, tokens_per_s = int(made.get(f"{name}/running", 0)), made.get(f"{name}/tok_s", 0.0)
            stats |= {"running": running, "tokens_per_s": tokens_per_s}
        workers.append(worker | {"pid": NO_PROCESS, "stats": stats})
    return {
        "time": time.time(),
        "pid": os.getpid(),
        "games": made["run/games"],
        "workers": workers,
        "has_ended": False,
    }


def picture_of_top(run: Path, path: Path) -> None:
    width, height = TOP_SIZE
    view = RunDirectory(run)
    view.refresh()
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, height=height, file=nowhere, highlight=False, force_terminal=True)
        console.print(draw(view, width, height, MachineLoad()), height=height)
    path.write_text(console.export_svg(title=f"unstable-lite top {run.name}", code_format=WITHOUT_FONTS))


def pictures_of_report(run: Path, report: Path, games: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page_file = write_report([run], Path(directory) / "report.html").path
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=REPORT_SIZE, device_scale_factor=SCALE, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-drawn]")
        _save(page, report)
        mode = page.locator("[data-act=mode]")
        if mode.count():  # the run kept its tokens
            mode.select_option("logprob")
        for turn in page.locator(".turns button").all():  # of the game that is open
            turn.click()
            if page.locator("#game .sampled").count():  # a model's turn
                break
        top_of_games = "document.querySelector('#browser').getBoundingClientRect().top + scrollY - 56"
        page.evaluate(f"scrollTo({{ top: {top_of_games}, behavior: 'instant' }})")
        page.mouse.move(0, 0)
        page.wait_for_timeout(500)
        _save(page, games)
        browser.close()


def _save(page: Page, path: Path) -> None:
    """Save what the page shows with 256 colours, which a page of text does not exceed by much."""
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main(run: Path) -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        picture_of_top(running_copy(run, Path(directory) / run.name), PICTURES / "top.svg")
    pictures_of_report(run, PICTURES / "report.png", PICTURES / "games.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
