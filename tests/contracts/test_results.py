"""docs/results.md says what the published runs say, and docs/scale.md what `bench scale` computes."""

import json
import re
from pathlib import Path

import pytest

from bench.study.reading import FOR_A_CLAIM
from unstable_lite.config.reading import drop_removed, parse_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
STUDIES = sorted((ROOT / "bench" / "results" / "studies").glob("*.json"))


def test_every_row_of_a_study_is_published():
    published = {row for path in STUDIES for row in path.with_suffix(".md").read_text(encoding="utf-8").splitlines()}
    tables = re.findall(r"^\| measure \|.*\n(?:\|.*\n)+", PAGE, re.MULTILINE)
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
    assert f"examples/studies/{path.stem}.toml" in PAGE and f"bench/results/studies/{path.stem}.json" in PAGE
    assert (ROOT / "examples" / "studies" / f"{path.stem}.toml").exists()


def test_scale_page_has_exactly_the_tables_that_the_bench_prints():
    from bench import plan  # imports torch

    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    section = page.partition("\n## Engines of a learner rank\n")[2].partition("\n## ")[0]
    for table in plan.tables():
        assert f"\n\n{table}\n\n" in section, "copy the tables of `python -m bench scale`"
        section = section.replace(table, "")
    assert "|" not in section and "```" not in section, "the page has a table that the bench does not print"
