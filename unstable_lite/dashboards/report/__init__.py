"""Report of a run, which may be in progress, as one HTML file, to be opened from disk without a network.

Changes nothing in the directory of the run. Knows nothing of the making of runs. Texts of models and all other foreign
texts go into the page as compressed data and onto the screen as text, never as markup.
"""

from unstable_lite.dashboards.report.page import write_report

__all__ = ["write_report"]
