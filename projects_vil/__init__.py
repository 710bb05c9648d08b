"""detectron2 extension for efficient vision transformers. Importing this package registers the builders."""

import importlib
from typing import TYPE_CHECKING, Any

from vil import choices

__all__ = [
    "Checkpointer",
    "Detector",
    "Run",
    "Trainer",
    "add_vil_config",
    "build_optimizer",
    "evaluate",
    "load_config",
    "register_datasets",
    "train",
]

if TYPE_CHECKING or choices.registers_builders:
    from projects_vil.api import *
else:

    def __getattr__(name: str) -> Any:
        """Import PyTorch and detectron2, and register the builders, at the first use of a name."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("projects_vil.api"), name)
