"""Write an HTML report of a run: curves, metrics, confusion matrix, matches, config and warnings."""

from projects_vil.report.page import write_report
