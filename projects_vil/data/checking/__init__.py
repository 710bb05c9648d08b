"""What is wrong with a COCO file, and a copy of it without that."""

from projects_vil.data.checking.check import Checked, check_dataset
from projects_vil.data.checking.findings import Findings
from projects_vil.data.checking.images import missing_files
from projects_vil.data.checking.kinds import KINDS, Kind
from projects_vil.data.checking.mend import Mended, mend

__all__ = [
    "KINDS",
    "Checked",
    "Findings",
    "Kind",
    "Mended",
    "check_dataset",
    "mend",
    "missing_files",
]
