"""What every tool needs."""

from projects_vil.utils.cli import ToolParser, check_json_path, run_tool, write_json
from projects_vil.utils.logging import log_run, log_to_stderr
from projects_vil.utils.signals import unwound_by_sigterm
from projects_vil.utils.warnings import silence_known_warnings

__all__ = [
    "ToolParser",
    "check_json_path",
    "log_run",
    "log_to_stderr",
    "run_tool",
    "silence_known_warnings",
    "unwound_by_sigterm",
    "write_json",
]
