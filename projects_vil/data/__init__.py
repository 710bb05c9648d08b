"""Registered datasets, dataset checks and fixes, reading of image files, and data loaders."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from projects_vil.data.api import *


def __getattr__(name: str) -> Any:
    """Import the modules at the first use of a name, because the dataset check must not import PyTorch."""
    return getattr(importlib.import_module("projects_vil.data.api"), name)
