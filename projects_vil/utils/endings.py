"""Why a run ended that nobody's mistake ended: processes that were killed, and those that lost another."""

import re
import signal

from torch.multiprocessing import ProcessExitedException

# torch's words for a worker process of a DataLoader that is no more.
_LOST_WORKER = re.compile(r"DataLoader worker \(pid\S*? [\d, ]+\) (?:is killed by signal: (?P<signal>[^.]+)|exited)")
# What gloo and NCCL say where another process of the group is gone.
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|pair closure|Timed out waiting|remote process|client socket|"
    r"failed to (recv|send)",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = (signal.SIGKILL, signal.SIGBUS)
_FEWER = "fewer DATALOADER.NUM_WORKERS"


class RunEnded(Exception):
    """A run was ended by something else than a mistake; the message is one line.

    Args:
        message: what ended it.
        status: of the process that says so.
        follows: whether the cause lies in another process, which may say more.
    """

    def __init__(self, message: str, *, status: int = 1, follows: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.follows = follows


def explain_ending(error: BaseException) -> RunEnded | None:
    """What an exception of torch means that tells of a process which is no more; None for any other."""
    if isinstance(error, RunEnded):
        return error
    if isinstance(error, ProcessExitedException):
        return process_ended(f"process {error.error_index}", error.exit_code)
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if (match := _LOST_WORKER.search(text)) is not None:
        return RunEnded(_worker_ended(match["signal"]))
    if _LOST_PEER.search(text):
        first = " ".join(text.split())[:200]
        return RunEnded(f"another process of this run has ended, or cannot be reached ({first})", follows=True)
    return None


def process_ended(which: str, code: int) -> RunEnded:
    """A process that ended by itself with an exit code as ``multiprocessing`` has it: minus the signal's number."""
    if code >= 0:
        return RunEnded(f"{which} ended with status {code}", status=code or 1)
    return RunEnded(f"{which} was killed by {_signal_name(-code)}{_often_memory(-code)}", status=128 - code)


def _worker_ended(description: str | None) -> str:
    """``description`` is that of the C library, as ``signal.strsignal`` gives it."""
    number = next((n for n in signal.valid_signals() if signal.strsignal(n) == description), None)
    if number is None:
        return f"a data loading process ended unexpectedly, often for want of memory: {_FEWER}"
    advice = f": {_FEWER}" if number in _OUT_OF_MEMORY else ""
    return f"a data loading process was killed by {_signal_name(number)}{_often_memory(number)}{advice}"


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def _often_memory(number: int) -> str:
    return ", often for want of memory" if number in _OUT_OF_MEMORY else ""
