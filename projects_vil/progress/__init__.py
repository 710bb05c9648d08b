"""How far a run is: its line in the log, a bar on a terminal, and services that gather curves."""

from projects_vil.progress.bar import ProgressBar
from projects_vil.progress.printer import ProgressPrinter
from projects_vil.progress.scalars import SMOOTHING_WINDOW, scalars_after
from projects_vil.progress.services import build_service_writers, check_services

__all__ = [
    "SMOOTHING_WINDOW",
    "ProgressBar",
    "ProgressPrinter",
    "build_service_writers",
    "check_services",
    "scalars_after",
]
