"""Locks, signals, logs and memory of processes."""

from projects_vil.utils.files import check_output_folder, check_unlocked, run_lock, unfinished_folder
from projects_vil.utils.logging import concerns_a_user, log_run, silence_known_warnings
from projects_vil.utils.processes import (
    STOP_SIGNALS,
    Terminated,
    deferred_signals,
    handling_signals,
    memory_of,
    peak_in_new_process,
    terminate,
    terminating_between_calls,
)

__all__ = [
    "STOP_SIGNALS",
    "Terminated",
    "check_output_folder",
    "check_unlocked",
    "concerns_a_user",
    "deferred_signals",
    "handling_signals",
    "log_run",
    "memory_of",
    "peak_in_new_process",
    "run_lock",
    "silence_known_warnings",
    "terminate",
    "terminating_between_calls",
    "unfinished_folder",
]
