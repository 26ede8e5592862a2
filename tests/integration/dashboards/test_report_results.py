"""The report's results beside those of `eval.jsonl` and of the terminal: one number everywhere."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from rich.console import Console

from fakes import shown_runs
from unstable_lite.dashboards.report import write_report
from unstable_lite.dashboards.run_directory import RunData, RunDirectory
from unstable_lite.dashboards.terminal import evaluation_tables
from unstable_lite.tracking.result_rows import ResultRow, to_markdown

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the finished quickstart, which got 349 of 400 points against the base: 87.25 %, which rounds to 87.2 %."""
    return shown_runs.quickstart(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(chromium: str, run: Path) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(write_report([run], run / "report.html").path.as_uri())
        page.wait_for_selector("html[data-ready]")
        yield page
        browser.close()


def rows_of(run: Path) -> list[ResultRow]:
    directory = RunDirectory(run)
    directory.refresh()
    return directory.results()


def test_each_number_is_that_of_eval_and_of_the_terminal(run: Path, page: Page) -> None:
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    rows = rows_of(run)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*evaluation_tables(rows))
    terminal = re.sub(r"[ %]+", " ", console.export_text())
    shown = [line.locator("th, td").all_inner_texts() for line in page.locator(".results tbody tr").all()]
    assert [cells[0].split("\n")[0] for cells in shown] == [row.label for row in rows]
    for row, (_, before, newest, _, change, *_, words) in zip(rows, shown, strict=True):
        of_row = [line for line in lines if line["opponent"] == row.opponent]
        for line, one, cell in ((of_row[0], row.before, before), (of_row[-1], row.newest, newest)):
            assert cell.split("\n") == [one.value_text, f"{one.interval_text}, n = {one.n}"]
            value, low, high, n = (float(number) for number in re.findall(r"[\d.]+", cell))
            in_json = [100 * line["points"], *(100 * edge for edge in line["interval"])]
            assert ([value, low, high], n) == (pytest.approx(in_json, abs=0.0501), line["n"])
            assert f" {value} {one.interval_text} " in terminal
        assert change.split("\n") == [row.change_text, row.change_interval_text]
        assert words.endswith(row.verdict_text)


def test_half_of_a_tenth_is_rounded_once(run: Path, page: Page) -> None:
    against_base = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    assert (against_base["opponent"], against_base["wins"], against_base["points"]) == ("base", 349, 0.8725)
    chart = page.locator("figure", has_text="Points against base").first
    expect(chart.locator(".latest b")).to_have_text("87.2 %")
    chart.get_by_text("Values").click()
    expect(chart.locator(".values tr").last).to_contain_text("87.2 %")
    expect(page.locator("#evaluations")).to_contain_text("87.2 %")
    assert "87.3" not in page.locator("body").inner_text()


def test_time_of_a_run_without_a_clock_in_live_json_is_that_of_its_metrics(tmp_path: Path) -> None:
    run = shown_runs.quickstart(tmp_path)
    live = json.loads((run / "live.json").read_text())
    (run / "live.json").write_text(json.dumps({name: value for name, value in live.items() if name != "seconds"}))
    newest = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert RunData(run).totals().seconds == newest["run/seconds"] > 0


def test_results_are_copied_as_markdown(run: Path, page: Page) -> None:
    table = to_markdown({"": rows_of(run)})
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == table
    assert "| base | 50.5 % | 87.2 % (" in table
