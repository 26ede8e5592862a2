"""Hook of MkDocs: makes the site of mkdocs.yml from docs/ and the files of the repository that the pages link to.

Links in docs/ are paths within the repository, so the pages work without the site too. A file outside of docs/ to which
a page links becomes a page of its own: Markdown as it is, other text as a block of code, a folder as the list of its
files. Images and JSON are copied. The navigation is that of docs/README.md. If the variable DEMO names a report of a
run, the site shows it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import unstable_lite

ROOT = Path(__file__).resolve().parents[1]
PLACES = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages whose place on the site is not that in the repository."""
COPIED = (".ipynb", ".json", ".png", ".svg")
LANGUAGES = {".jsonl": "json", ".py": "python", ".sbatch": "bash", ".toml": "toml", ".yaml": "yaml"}
CODE = r"```.*?```|`(?!`)(?P<key>[\w.]*)[^`]*`"
LINK = re.compile(CODE + r"|(?<=\]\()(?P<link>[^)\s]+)(?=\))|(?<=src=\")(?P<image>[^\"]+)", re.DOTALL)
"""Code, in which nothing is a link, or the target of a link or an image."""
API = {
    "Python": [f"unstable_lite.{name}" for name in sorted(unstable_lite.__all__, key=str.lower)],
    "Samplers": [f"unstable_lite.league.samplers.{name}" for name in ("env_samplers", "model_samplers")],
    "Reward transforms": ["unstable_lite.reward_transformations.transforms"],
    "Algorithms": [f"unstable_lite.learner.{name}" for name in ("Learner", "UpdateResult", "losses", "objective")],
    "Opponents": [
        "unstable_lite.games.players.policy.Player",
        *(f"unstable_lite.games.players.{name}" for name in ("scripted", "blind", "lookahead")),
    ],
    "Engines": ["unstable_lite.engines.base"],
    "Types": ["unstable_lite.types"],
    "Errors": ["unstable_lite.errors"],
}
"""Pages of the API reference, each with the modules or names whose docstrings it shows."""
DEMO_PAGE = """---
hide: [toc]
---
# A report

One run of the quickstart, as `python -m unstable_lite report RUN` writes it ([the report](evaluate.md#the-report)).
<a href="demo/report.html">Show it alone.</a>

<iframe src="demo/report.html" title="Report of a run of the quickstart"></iframe>
"""

KEYS = set(re.findall(r"^### `(\w+\..+)`$", (ROOT / "docs" / "config.md").read_text(encoding="utf-8"), re.M))
"""The keys of a config, without those of environments."""

origins: dict[str, PurePosixPath] = {}
"""Path in the repository of each page from it, by its path on the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation: the home page, the sections of docs/README.md, the API, and the project."""
    nav: list[dict[str, list[str]]] = [{"Home": ["index.md", "contents.md", *["demo.md"] * bool(config.extra["demo"])]}]
    for line in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").splitlines():
        if section := re.fullmatch(r"(\w[\w ]*):", line):
            nav.append({section[1]: []})
        elif item := re.match(r"(?:\d+\.|-) \[[^]]*\]\(([^)]+)\)", line):
            for pages in nav[-1].values():
                pages.append(place_of(resolved(PurePosixPath("docs"), item[1])))
    nav.append({"API": [api_page(title) for title in API]})
    project = [place_of(PurePosixPath(name)) for name in ("CONTRIBUTING.md", "CHANGELOG.md", "bench/LOG.md")]
    config.nav = [*nav, {"Project": project}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the files that pages show."""
    origins.clear()
    origins.update({file.src_uri: PurePosixPath("docs", file.src_uri) for file in files.documentation_pages()})
    contents = files.get_file_from_path("README.md")
    assert contents is not None
    files.remove(contents)
    del origins["README.md"]
    left = [*map(PurePosixPath, (*PLACES, "bench/LOG.md")), *origins.values()]
    for path in left:  # it grows by the files that these link to
        place = place_of(path)
        if place.endswith(".md"):
            text = text_of(path)
            if place not in origins:
                origins[place] = path
                files.append(File.generated(config, place, content=text))
            left += [target for target in targets(place, text) if target not in left]
        elif files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for title, names in API.items():
        shown = "\n\n".join(f"::: {name}" for name in names)
        files.append(File.generated(config, api_page(title), content=f"# {title}\n\n{shown}\n"))
    if config.extra["demo"]:
        files.append(File.generated(config, "demo/report.html", abs_src_path=config.extra["demo"]))
        files.append(File.generated(config, "demo.md", content=DEMO_PAGE))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make links to files of the repository links to their places on the site, and each name of a key a link."""
    place = page.file.src_uri
    if place.startswith("repository/"):
        page.meta["search"] = {"exclude": True}  # code would come before the pages that explain it

    def on_site(found: re.Match[str]) -> str:
        link = found["link"] or found["image"]
        if (key := found["key"]) in KEYS and place != "config.md" and markdown[found.start() - 1] != "[":
            keys = posixpath.relpath("config.md", posixpath.dirname(place) or ".")
            return f"[{found[0]}]({keys}#{key.replace('.', '')})"
        if link is None or (target := target_of(place, link)) is None:
            return found[0]
        _, hash_sign, anchor = link.partition("#")
        return posixpath.relpath(place_of(target), posixpath.dirname(place) or ".") + hash_sign + anchor

    return LINK.sub(on_site, markdown) if place in origins else markdown


def api_page(title: str) -> str:
    return f"api/{title.lower().replace(' ', '_')}.md"


def place_of(path: PurePosixPath) -> str:
    """Return the path on the site of a file or folder of the repository."""
    if place := PLACES.get(str(path)):
        return place
    if path.is_relative_to("docs"):
        return str(path.relative_to("docs"))
    if (ROOT / path).is_dir():
        return f"repository/{path}/index.md"
    return f"repository/{path}" + ".md" * (path.suffix not in (".md", *COPIED))


def text_of(path: PurePosixPath) -> str:
    """Return Markdown that shows a file or folder of the repository."""
    real = ROOT / path
    if real.is_dir():
        names = sorted(each.name + "/" * each.is_dir() for each in real.iterdir() if each.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name.rstrip('/')})" for name in names)
    text = real.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {path}\n\n``````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n``````\n"


def targets(place: str, text: str) -> Iterator[PurePosixPath]:
    """Yield the files and folders of the repository to which a page links."""
    for found in LINK.finditer(text):
        link = found["link"] or found["image"]
        if link is not None and (target := target_of(place, link)) is not None:
            yield target


def target_of(place: str, link: str) -> PurePosixPath | None:
    """Return the file of the repository to which a page from it links; None for a place on the page or elsewhere."""
    path, _, _ = link.partition("#")
    if not path or ":" in path:
        return None
    origin = origins[place]
    target = resolved(origin if (ROOT / origin).is_dir() else origin.parent, path)
    return target if (ROOT / target).exists() else None


def resolved(folder: PurePosixPath, link: str) -> PurePosixPath:
    return PurePosixPath(posixpath.normpath(folder / link))
