"""How much memory a process has, as Linux counts it."""

import re
from pathlib import Path


def memory_of(process: int | str = "self", *, peak: bool = False) -> int | None:
    """Bytes that a process has in memory, or the most that it ever had; None where the system has no /proc.

    What ``getrusage`` tells of a child begins with what its parent had when it was forked.

    Args:
        process: its number.
        peak: since it began, or since :func:`forget_peak`.
    """
    status = Path(f"/proc/{process}/status")
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def forget_peak() -> None:
    """What this process has had until now counts no more."""
    Path("/proc/self/clear_refs").write_text("5")
