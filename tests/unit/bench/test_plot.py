"""Plots of studies: they can be read in light and in dark, and without telling colours apart."""

import re

import pytest

from bench.plot import COLOURS, MARKS, STYLE, Chart, to_svg
from fakes.contrast import contrast, mixed, of_hex

PAPERS = re.findall(r"\.paper{fill:(#\w+)}", STYLE.replace("#fff}", "#ffffff}"))


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("colour", COLOURS)
def test_marks_stand_out_from_the_paper(colour, paper):
    assert len(PAPERS) == 2
    assert contrast(mixed(of_hex(colour), 0.85, of_hex(paper)), of_hex(paper)) >= 3


def test_each_line_has_a_mark_of_its_own_in_plot_and_legend():
    names = [f"arm {number}" for number in range(len(MARKS) + 2)]
    svg = to_svg(
        [Chart(title="", x_label="x", y_label="y", lines={name: [(1.0, 2.0)] for name in names}, marks="dots")]
    )
    marks = re.findall(r'd="(M[^"]+z)" [^>]*fill="(#\w+)" fill-opacity="0.85"', svg)
    assert len({*marks}) == len(names) and sorted(marks) == sorted(2 * [*{*marks}])
    assert [y for y in (21, 30, 43, 56) if f'y="{y:.1f}"' in svg] == [30, 43]  # the legend takes two lines
