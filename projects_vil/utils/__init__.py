"""What every tool needs."""

from projects_vil.utils.cli import check_json_path, run_tool, write_json

__all__ = [
    "check_json_path",
    "run_tool",
    "write_json",
]
