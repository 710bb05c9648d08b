"""Exported detectors, and the proof that they give the same answers."""

from projects_vil.export.api import export_detector
from projects_vil.export.exportable.build import make_exportable
from projects_vil.export.fitting import fitted_size, padded
from projects_vil.export.formats import FORMATS, is_exported
from projects_vil.export.metadata import digest_of, read_metadata
from projects_vil.export.proof.report import describe_report
from projects_vil.export.request import ALL_PRECISIONS, INPUT_DTYPES, PRECISIONS
from projects_vil.export.runtime import ExportedDetector, ExportedModel, paste_masks, to_instances
from projects_vil.export.table import TABLE_DETECTORS, TABLE_FAMILIES, available_formats, describe_table, export_table

__all__ = [
    "ALL_PRECISIONS",
    "FORMATS",
    "INPUT_DTYPES",
    "PRECISIONS",
    "TABLE_DETECTORS",
    "TABLE_FAMILIES",
    "ExportedDetector",
    "ExportedModel",
    "available_formats",
    "describe_report",
    "describe_table",
    "digest_of",
    "export_detector",
    "export_table",
    "fitted_size",
    "is_exported",
    "make_exportable",
    "padded",
    "paste_masks",
    "read_metadata",
    "to_instances",
]
