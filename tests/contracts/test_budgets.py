"""The budget of Python lines of each folder, in budgets.txt. It may only fall.

python tests/contracts/test_budgets.py            # lower each budget to the lines of now
python tests/contracts/test_budgets.py --raise    # also raise; the commit says why the change needs more
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("budgets.txt")


def lines_by_folder() -> Counter[str]:
    """Count the lines of the folders of the package, those of tests/, and bench/ as a whole."""
    lines = Counter[str]()
    for top, depth in (("unstable_lite", 2), ("tests", 2), ("bench", 1)):
        for path in (ROOT / top).rglob("*.py"):
            folder = "/".join(path.relative_to(ROOT).parent.parts[:depth])
            lines[folder] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def budgets() -> dict[str, int]:
    return {folder: int(budget) for budget, folder in map(str.split, TABLE.read_text().splitlines())}


def test_no_folder_has_more_lines_than_its_budget():
    allowed = budgets()
    over = [
        f"{folder}: {lines} lines, budget {allowed.get(folder, 0)}"
        for folder, lines in lines_by_folder().items()
        if lines > allowed.get(folder, 0)
    ]
    assert not over, "make room, or run tests/contracts/test_budgets.py --raise and say why in the commit"


if __name__ == "__main__":
    before = budgets()
    may_rise = "--raise" in sys.argv
    now = {folder: n if may_rise else min(n, before.get(folder, n)) for folder, n in lines_by_folder().items() if n}
    TABLE.write_text("".join(f"{budget:6} {folder}\n" for folder, budget in sorted(now.items())))
