"""One page about a run: curves, what its detector finds and misses, its configuration and its warnings."""

from projects_vil.report.write import write_report

__all__ = [
    "write_report",
]
