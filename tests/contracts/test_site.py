"""The site of mkdocs.yml, built as CI and the deployment build it: no warning, no dead link, nothing from outside."""

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import expect

import unstable_lite
from fakes.http_servers import QuietHandler, http_server

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
PAGES = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
"""Elements with which a page loads another file."""


class Seen(HTMLParser):
    """Anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.in_nav = set[str](), set[str](), set[str]()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.loaded |= {values[name] for name in [LOADED.get(tag, "")] if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
            if "md-nav__link" in values.get("class", ""):
                self.in_nav.add(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    report = directory / "made.html"
    report.write_text("<title>Report of a run</title>")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", directory / "site"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "DEMO": str(report), "PYTHONPATH": "."}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "site"


@pytest.fixture(scope="module")
def seen(site: Path) -> dict[Path, Seen]:
    return {path: Seen(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_page_of_docs_is_in_the_navigation(site, seen):
    expected = {f"{name.removesuffix('.md')}.html" for name in PAGES}
    assert expected <= seen[site / "contents.html"].in_nav


def test_every_link_and_picture_of_the_site_has_a_target(site, seen):
    missing = []
    for page, page_seen in seen.items():
        if page.name == "404.html":  # its links begin at the root of the server
            continue
        for link in page_seen.links | page_seen.loaded:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                url.fragment and target.suffix == ".html" and url.fragment not in seen[target].ids
            ):
                missing.append(f"{page.relative_to(site)}: {link}")
    assert missing == []
    assert (site / "repository/bench/results/studies/kuhn_opponents-scatter.svg").exists()
    assert "demo/report.html" in seen[site / "demo.html"].loaded


def test_a_key_on_a_page_links_to_its_description(site, seen):
    assert "config.html#runeval_share" in seen[site / "migration.html"].links
    assert "config.html#trackerkeep_tokens" in seen[site / "evaluate.html"].links
    assert {"runeval_share", "trackerkeep_tokens", "templatesnamechat"} <= seen[site / "config.html"].ids


def test_pages_load_nothing_from_other_servers(seen):
    loaded = {link for page in seen.values() for link in page.loaded}
    assert loaded
    assert [link for link in loaded if urlsplit(link).netloc] == []


def test_api_reference_has_every_public_name(site, seen):
    assert {f"unstable_lite.{name}" for name in unstable_lite.__all__} <= seen[site / "api" / "python.html"].ids


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Handler(QuietHandler, SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=site)

    with http_server(Handler) as url:
        yield f"{url}/"


@pytest.mark.browser
def test_search_finds_a_key_and_the_page_asks_no_other_server(address, browser):
    asked: list[str] = []
    page = browser.new_page(color_scheme="dark", viewport={"width": 1440, "height": 900})
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    page.locator("input.md-search__input").press_sequentially("max_staleness")
    expect(page.locator(".md-search-result__item", has_text="Every key of a config")).to_be_visible()
    page.close()
    assert asked
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
