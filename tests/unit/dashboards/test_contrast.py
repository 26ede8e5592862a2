"""Contrast of the report's colours, computed from page.css: text 4.5 to 1, marks 3 to 1, in light and in dark."""

import io
import re
from pathlib import Path

import pytest

from fakes.contrast import Colour, contrast, mixed, of_hex
from unstable_lite.dashboards import report
from unstable_lite.dashboards.terminal import VisibleConsole

CSS = (Path(report.__file__).parent / "page.css").read_text("utf-8")
THEMES = ("light", "dark")


def rule(selector: str) -> str:
    """Return the background of the rule, with each end of a scale that is mixed in oklab as a colour of its own."""
    (body,) = re.findall(rf"^{re.escape(selector)} {{(.*)}}$", CSS, re.M)
    (background,) = re.findall(r"background: (.*?);", body)
    return str(background)


def end(selector: str, colour: str) -> str:
    """Return the background of a cell of the matrix at one end of its scale."""
    return re.sub(r"color-mix\(in oklab.*?\)\)", f"var(--{colour})", rule(selector))


def paint(expression: str, theme: str, under: str = "var(--card)") -> Colour:
    """Return a CSS colour that lies on another one."""
    if expression == "transparent":
        return paint(under, theme)
    if name := re.fullmatch(r"var\(--([\w-]+)\)", expression):
        (colours,) = re.findall(rf"^  --{name[1]}: light-dark\((#\w+), (#\w+)\);$", CSS, re.M)
        return of_hex(colours[THEMES.index(theme)])
    mix = re.fullmatch(r"color-mix\(in srgb, (.+?) (\d+)%, (.+)\)", expression)
    assert mix, expression
    return mixed(paint(mix[1], theme, under), int(mix[2]) / 100, paint(mix[3], theme, under))


TOKEN = 50
"""Strength of the deepest tint of a token, in per cent: page.js."""
FAINT = 70
"""Opacity of a seed's line behind the mean, in per cent: page.js."""
CHOSEN = rule('.list [aria-current="true"]')
PAIRS: list[tuple[str, str, str, float]] = [
    *(
        (f"var(--{text})", f"var(--{under})", "", 4.5)
        for text in ("ink", "soft")
        for under in ("paper", "card", "wash")
    ),
    *((f"var(--{text})", "var(--card)", "", 4.5) for text in ("accent", "good", "bad", "warn")),
    *((f"var(--run-{run})", "var(--card)", "", 3.0) for run in range(6)),
    *((f"var(--{mark})", "var(--card)", "", 3.0) for mark in ("edge", "unlikely", "less")),
    ("var(--good)", rule(".tag.win"), "", 4.5),
    ("var(--ink)", rule(".tag.loss"), "", 4.5),
    ("var(--warn)", rule(".tag.invalid, .tag.void, .tag.truncated"), "", 4.5),
    ("var(--soft)", CHOSEN, "var(--card)", 4.5),
    ("var(--ink)", rule('.turns button[aria-current="true"]'), "var(--card)", 4.5),
    *(("var(--ink)", end(".matrix td", side), "", 4.5) for side in ("less", "unlikely")),
    *(("var(--soft)", end(".matrix td.few", side), "", 4.5) for side in ("less", "unlikely")),
    *(
        ("var(--ink)", f"color-mix(in srgb, var(--{side}) {TOKEN}%, var(--wash))", "", 4.5)
        for side in ("less", "unlikely")
    ),
    *((f"color-mix(in srgb, var(--run-{run}) {FAINT}%, var(--card))", "var(--card)", "", 3.0) for run in range(6)),
    (rule(".range i"), "var(--wash)", "", 3.0),
    (rule(".range b"), "var(--wash)", "", 3.0),
]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("mark", "background", "under", "least"), PAIRS)
def test_text_and_marks_stand_out_from_their_background(mark, background, under, least, theme):
    assert contrast(paint(mark, theme), paint(background, theme, under)) >= least


def test_counts_in_the_matrix_have_the_colour_of_their_cell():
    assert ".matrix td small { color: inherit; }" in CSS
    script = (Path(report.__file__).parent / "page.js").read_text("utf-8")
    assert f"Math.round({TOKEN} * strength)" in script and f"faint ? {FAINT / 100} : 1" in script


def test_no_rule_names_a_colour_of_its_own():
    rules = CSS[CSS.index("\n}\n") :]
    assert not re.findall(r"#[0-9a-f]{3,8}\b|\brgba?\(|: (?:red|yellow|orange|white|black)\b", rules)


def test_progress_of_a_run_is_neither_red_nor_yellow():
    """Rich's own bars are red, and its times are yellow."""
    console = VisibleConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    for style in ("bar.complete", "bar.finished", "bar.pulse", "progress.elapsed", "progress.remaining"):
        colour = console.get_style(style).color
        assert colour is None or colour.name in ("green", "default")


def test_no_text_of_the_terminal_is_yellow_or_cyan():
    package = Path(report.__file__).parents[2]
    named = [
        (path.name, style)
        for path in package.rglob("*.py")
        for style in re.findall(r'"(\w*(?:yellow|cyan))"', path.read_text())
    ]
    assert named == []
