"""What every tool needs."""

from projects_vil.utils.cli import ToolParser, check_json_path, run_tool, write_json

__all__ = [
    "ToolParser",
    "check_json_path",
    "run_tool",
    "write_json",
]
