"""Every detector with every backbone family in every format: how near each is to eager, how good, fast and large."""

from projects_vil.export.table.measuring import available_formats, export_table
from projects_vil.export.table.subjects import TABLE_DETECTORS, TABLE_FAMILIES, lively_detector
from projects_vil.export.table.text import describe_cell, describe_table

__all__ = [
    "TABLE_DETECTORS",
    "TABLE_FAMILIES",
    "available_formats",
    "describe_cell",
    "describe_table",
    "export_table",
    "lively_detector",
]
