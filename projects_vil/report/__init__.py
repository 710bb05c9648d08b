"""One page about a run: curves, metrics, confusions and matches, its configuration and its warnings."""

from projects_vil.report.page import write_report
