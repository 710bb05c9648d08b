"""What every tool needs."""

from projects_vil.utils.cli import ToolParser, check_json_path, check_output_folder, run_tool, write_json
from projects_vil.utils.endings import RunEnded, explain_ending, process_ended
from projects_vil.utils.locking import check_unlocked, run_lock
from projects_vil.utils.logging import log_run, log_to_stderr
from projects_vil.utils.process_memory import memory_of, peak_in_new_process
from projects_vil.utils.signals import (
    STOP_SIGNALS,
    ToldToEnd,
    end_by_signal,
    handling_signals,
    heeded_signals,
    held_signals,
    told_between_calls,
    unwound_by_signals,
)
from projects_vil.utils.unfinished import unfinished_folder
from projects_vil.utils.warnings import silence_known_warnings

__all__ = [
    "STOP_SIGNALS",
    "RunEnded",
    "ToldToEnd",
    "ToolParser",
    "check_json_path",
    "check_output_folder",
    "check_unlocked",
    "end_by_signal",
    "explain_ending",
    "handling_signals",
    "heeded_signals",
    "held_signals",
    "log_run",
    "log_to_stderr",
    "memory_of",
    "peak_in_new_process",
    "process_ended",
    "run_lock",
    "run_tool",
    "silence_known_warnings",
    "told_between_calls",
    "unfinished_folder",
    "unwound_by_signals",
    "write_json",
]
