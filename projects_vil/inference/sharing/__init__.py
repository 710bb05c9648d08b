"""A detector as a folder for others, and on the hub."""

from projects_vil.inference.sharing.folder import MANIFEST_FILE, WEIGHTS_FILE, check_saved
from projects_vil.inference.sharing.hub import Shared, hint_at_hub

__all__ = ["MANIFEST_FILE", "WEIGHTS_FILE", "Shared", "check_saved", "hint_at_hub"]
