"""Pictures of the docs, from real runs: `python docs/pictures.py top RUN` and `python docs/pictures.py report RUN …`.

`top` draws one frame of the dashboard, preferably during the run; `report` shows the report of the runs in a headless
Chromium (Debian's `chromium`; playwright comes with the extra `test`). The pictures are written to docs/pictures, or to
the folder in the environment variable PICTURES.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from unstable_lite.dashboards.report import write_report
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.dashboards.top import MachineLoad, draw

PICTURES = Path(os.environ.get("PICTURES", Path(__file__).parent / "pictures"))
TOP_SIZE = (112, 29)
REPORT_SIZE = {"width": 1180, "height": 900}
WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
"""Template of a picture that loads nothing: rich's own template asks a server for its font."""


def picture_of_top(run: Path, path: Path) -> None:
    width, height = TOP_SIZE
    view, load = RunDirectory(run), MachineLoad()
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, height=height, file=nowhere, highlight=False, force_terminal=True)
        view.refresh()
        draw(view, width, height, load)
        time.sleep(1)  # processor time is measured between two draws
        console.print(draw(view, width, height, load), height=height)
    path.write_text(console.export_svg(title=f"unstable-lite top {run.name}", code_format=WITHOUT_FONTS))


def pictures_of_report(runs: list[Path], report: Path, games: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page_file = write_report(runs, Path(directory) / "report.html").path
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=REPORT_SIZE, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-drawn]")
        _show_top_of(page, "#curves")
        page.screenshot(path=report, clip={"x": 0, "y": 0, "width": 1180, "height": 590})
        listed = page.locator("#list button")
        for name, value in (("kind", "train"), ("outcome", "win"), ("end", "natural")):
            page.locator(f"#filters [name={name}]").select_option(value)
            if not listed.count():
                page.locator(f"#filters [name={name}]").select_option("")
        listed.nth(listed.count() // 2).click()
        page.locator(".turns button").last.click()
        page.locator("[data-act=mode]").select_option("logprob")
        _show_top_of(page, "#browser")
        page.screenshot(path=games, clip={"x": 0, "y": 0, "width": 1180, "height": 860})
        browser.close()


def _show_top_of(page: Page, selector: str) -> None:
    to = f"document.querySelector('{selector}').getBoundingClientRect().top + scrollY - 56"
    page.evaluate(f"scrollTo({{ top: {to}, behavior: 'instant' }})")
    page.wait_for_timeout(500)


def main(what: str, runs: list[Path]) -> None:
    PICTURES.mkdir(exist_ok=True)
    if what == "top":
        picture_of_top(runs[0], PICTURES / "top.svg")
    else:
        pictures_of_report(runs, PICTURES / "report.png", PICTURES / "games.png")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [("top" | "report") as what, *runs] if runs:
            main(what, [Path(run) for run in runs])
        case _:
            raise SystemExit(__doc__)
