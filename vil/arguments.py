"""Arguments that the commands share, and the error handling of a command.

This module does not import PyTorch. A command parses its arguments before it imports the library, so ``--help`` and
errors in the arguments appear at once.
"""

import argparse
import difflib
import errno
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from backbones.errors import GENERATOR, ConfigError, check_replaceable, closest, find_os_error, printable
from vil.choices import DEVICES, NAMES_OF_OTHERS

if TYPE_CHECKING:
    from detectron2.config import CfgNode

# Arguments that set a config key.
SHORT_FORMS = {"weights": "MODEL.WEIGHTS", "device": "MODEL.DEVICE"}
# Flags that set a config key. An error about the key names the flag.
_FLAGS = {f"--{name}": key for name, key in SHORT_FORMS.items()}
_FLAGS |= {"--batch": "SOLVER.IMS_PER_BATCH", "--epochs": "SOLVER.EPOCHS", "--image-size": "INPUT.MIN_SIZE_TRAIN"}
_FLAGS |= {"--lr": "SOLVER.BASE_LR", "--output": "OUTPUT_DIR", "--workers": "DATALOADER.NUM_WORKERS"}
# First parts of all config keys.
SECTIONS = frozenset(
    (
        *("CUDNN_BENCHMARK", "DATALOADER", "DATASETS", "FLOAT32_PRECISION", "GLOBAL", "INFERENCE", "INPUT", "LOGGING"),
        *("MODEL", "OUTPUT_DIR", "OVERWRITE_OUTPUT_DIR", "SEED", "SOLVER", "TEST", "VERSION", "VIS_PERIOD"),
    )
)
# A misspelled key such as SOLVR.BASE_LR is accepted as a key, so that the error suggests the closest one.
_LIKE_A_KEY = re.compile(r"([A-Z][A-Z0-9_]+)(\.[A-Z][A-Z0-9_]*)+")
# Start of the last line of a traceback from another process, which arrives as text.
_REMOTE = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
# Seconds that a process under torchrun waits, so that only the first process on each machine prints a common error.
_TORCHRUN_SECONDS = 10


# Types of arguments --------------------------------------------------------------------------------------------------


def existing_path(text: str) -> str:
    """Return ``text`` if it is an existing file or folder, or a URL. This is an argparse type."""
    if "://" not in text and not Path(text).exists():
        raise argparse.ArgumentTypeError(f"'{text}' does not exist. Check the path")
    return text


def weights_file(text: str) -> str:
    """Return ``text`` if it is an existing path, a URL, or could be a name in the model zoo."""
    return text if re.fullmatch(r"\w+", text) else existing_path(text)


def image_source(text: str) -> str:
    """Return ``text`` if it is an existing path, a URL, a camera number, or a pattern with {000..127}."""
    return text if text.isdecimal() or "{" in text else existing_path(text)


def output_file(text: str) -> str:
    """Return ``text`` if a file can be written at this path. This is an argparse type.

    An existing file is overwritten only if an earlier command wrote it.
    """
    path = Path(text).absolute()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a folder. Give a file name")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write '{text}': folder '{path.parent}' does not exist. Create it")
    try:
        check_replaceable(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write '{text}': permission denied. Choose another file")
    return text


def positive(text: str, *, least: int = 1) -> int:
    """Return a whole number of at least ``least``. This is an argparse type."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}")
    return int(text)


def positive_or_auto(text: str) -> int | str:
    """Return a whole number of at least 1, or ``"auto"``. This is an argparse type."""
    return text if text == "auto" else positive(text)


def not_negative(text: str) -> int:
    """Return a whole number of at least 0. This is an argparse type."""
    return positive(text, least=0)


def shard(text: str) -> tuple[int, int]:
    """Return I and N of a shard ``I/N``. This is an argparse type."""
    if not re.fullmatch(r"\d+/\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard. Write I/N, such as 0/16")
    number, total = text.split("/")
    return int(number), int(total)


# Parsers -------------------------------------------------------------------------------------------------------------


class ToolParser(argparse.ArgumentParser):
    """Parser that prints a docstring as help, and each error as one line with exit status 2.

    Args:
        description: Docstring of the command, with an example.
    """

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def parse_args(  # type: ignore[override]  # argparse declares overloads for other namespace classes
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        # A shell does not expand ~ in quotes or in --output=~/x.
        words = [
            re.sub(r"^(--[\w-]+=)?(~[^/]*)", lambda found: (found[1] or "") + os.path.expanduser(found[2]), word)
            for word in (sys.argv[1:] if args is None else args)
        ]
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            self.error(f"unknown argument '{flag}'{self._hint(flag)}")
        return parsed

    def add(self, name: str, help_text: str, **options: Any) -> None:
        """Add an argument with its help. A whole number is shown as ``N``."""
        if options.get("type") in (positive, not_negative):
            options.setdefault("metavar", "N")
        self.add_argument(name, help=help_text, **options)

    def _hint(self, flag: str) -> str:
        return closest(flag, {*SECTIONS, *self._option_string_actions})

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"error: {printable(message[:1].upper() + message[1:])}{end} Add --help to list all arguments.\n")


class ConfigToolParser(ToolParser):
    """Parser that also accepts config keys as ``KEY VALUE`` pairs, in any position, with or without ``--opts``.

    After parsing, ``args.opts`` has all pairs. ``--weights`` and ``--device`` are added as the pairs of
    ``MODEL.WEIGHTS`` and ``MODEL.DEVICE``.

    Args:
        description: Docstring of the command, with an example.
        config_file: Add ``--config-file FILE``.
        config_required: Make ``--config-file`` required.
        weights: Add ``--weights FILE``.
        devices: Device types that the command supports. If there are any, ``--device`` is added.
    """

    def __init__(
        self,
        description: str | None,
        *,
        config_file: bool = True,
        config_required: bool = True,
        weights: bool = False,
        devices: Sequence[str] = DEVICES,
        **options: Any,
    ) -> None:
        epilog = (
            "KEY VALUE pairs, such as SOLVER.BASE_LR 5e-5, override config keys. They can be in any position. --opts "
            "before\nthem is optional."
        )
        super().__init__(description, epilog=epilog, **options)
        self.set_defaults(devices=tuple(devices))
        if config_file:
            options = {"required": config_required, "type": existing_path, "metavar": "FILE"}
            self.add_argument("--config-file", **options, help="config of the model")
        if weights:
            weights_help = "checkpoint, or name in the model zoo (config key MODEL.WEIGHTS)"
            self.add_argument("--weights", metavar="FILE", help=weights_help)
        if devices:
            default = "; default: the device of the config, or cpu without a GPU" if "cuda" in devices else ""
            device_help = f"{' or '.join(devices)} (config key MODEL.DEVICE{default})"
            self.add_argument("--device", metavar="DEVICE", help=device_help)

    def parse_known_args(  # type: ignore[override]  # argparse declares overloads for other namespace classes
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words, overrides = self._split(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(words, namespace)
        given = dict(zip(overrides[::2], overrides[1::2], strict=True))
        for name, key in SHORT_FORMS.items():
            value = getattr(parsed, name, None)
            if value is None:
                continue
            if given.get(key, value) != value:
                self.error(f"--{name} {value} and {key} {given[key]} set the same config key. Remove one of them")
            overrides += [key, value]
            given[key] = value
        try:
            weights_file(given.get("MODEL.WEIGHTS") or "://")
        except argparse.ArgumentTypeError as error:
            self.error(f"MODEL.WEIGHTS: {error}")
        parsed.opts = overrides
        if hasattr(parsed, "weights"):
            parsed.weights = given.get("MODEL.WEIGHTS")
        return parsed, unknown

    def _hint(self, flag: str) -> str:
        name = flag.removeprefix("--").replace("-", "_")
        same = f"--{NAMES_OF_OTHERS.get(name, name).replace('_', '-')}"
        if same in self._option_string_actions:
            return f". Write {same}"
        if same == "--data" and any(action.dest == "data" for action in self._actions):
            return ". Write the path without it"
        if same in _FLAGS:
            return f". Write {_FLAGS[same]} VALUE"
        return super()._hint(flag)

    def _split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the arguments of the command, and the config keys and values."""
        arguments: list[str] = []
        overrides: list[str] = []
        left = iter(words)
        for word in left:
            action = self._option_string_actions.get(arguments[-1]) if arguments else None
            is_value = action is not None and action.nargs is None
            if word == "--opts":
                continue
            if is_value or not _is_key(word) or Path(word).exists():
                arguments.append(word)
                continue
            value = next(left, None)
            if "=" in word:
                self.error(f"the override '{word}' has an '='. Write {word.replace('=', ' ', 1)}")
            is_key = value is not None and value.partition(".")[0] in SECTIONS and ("." in value or "_" in value)
            if value is None or value.startswith("--") or (is_key and not Path(value).exists()):
                self.error(f"the override {word} has no value. Write {word} VALUE")
            overrides += [word, value]
        return arguments, overrides


def _is_key(word: str) -> bool:
    """Return whether a word, such as ``SEED``, ``SOLVER.BASE_LR`` or ``SOLVR.BASE_LR=1``, is meant as a config key."""
    section = word.partition("=")[0].partition(".")[0]
    like = _LIKE_A_KEY.fullmatch(word.partition("=")[0])
    return section in SECTIONS or bool(like and difflib.get_close_matches(section, SECTIONS, cutoff=0.75))


def add_training_arguments(parser: ToolParser) -> None:
    """Add the arguments of detectron2's ``default_argument_parser``, except for overrides."""
    parser.add_argument("--config-file", default="", required=True, type=existing_path, metavar="FILE", help="config")
    add_resume_argument(parser)
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS instead of training")
    add_process_arguments(parser)


def add_resume_argument(parser: ToolParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint in the output directory"
    )


def add_process_arguments(parser: ToolParser) -> None:
    """Add the arguments of detectron2's parser that describe the processes of a run."""
    processes = "number of GPUs to use on this machine; with --device cpu, number of processes (default 1)"
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help=processes)
    parser.add_argument("--num-machines", type=int, default=1, metavar="N", help="number of machines (default 1)")
    parser.add_argument("--machine-rank", type=int, default=0, metavar="R", help="number of this machine, from 0")
    # As in detectron2, the default port depends on the user.
    user = os.getuid() if sys.platform != "win32" else 1
    url = f"tcp://127.0.0.1:{2**15 + 2**14 + hash(user) % 2**14}"
    url_help = "tcp://HOST:PORT of the first machine; needed with several machines"
    parser.add_argument("--dist-url", default=url, metavar="URL", help=url_help)
    timeout_help = "seconds to wait for the other machines at the start (default 600)"
    parser.add_argument("--dist-timeout", type=positive, default=600, metavar="S", help=timeout_help)


def process_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`add_process_arguments` as keyword arguments."""
    names = ("num_gpus", "num_machines", "machine_rank", "dist_url", "dist_timeout")
    return {name: getattr(args, name) for name in names}


def config_of(args: argparse.Namespace, path: str | Path | None = None) -> "CfgNode":
    """Return a config with the overrides of a command and an available device.

    Args:
        args: Arguments from a :class:`ConfigToolParser` with devices.
        path: Path of a config. The default is ``--config-file``.

    Raises:
        ConfigError: If ``load_config`` raises it, or if a requested device is not available.
    """
    from projects_vil.config import choose_device, load_config

    requested = SHORT_FORMS["device"] in args.opts[::2]
    return choose_device(load_config(path or args.config_file, args.opts), devices=args.devices, requested=requested)


# How a tool ends -----------------------------------------------------------------------------------------------------


def show(*lines: object) -> None:
    """Print lines to stdout. Control characters, which file names may contain, are escaped."""
    for line in lines:
        print(printable(line))


def write_json(path: str | None, content: object) -> None:
    """Write ``content`` as JSON if ``path`` is set. A list is written as the value of ``rows``."""
    if path:
        from backbones.checkpoint_files import atomic_write

        content = {"generator": GENERATOR} | (content if isinstance(content, dict) else {"rows": content})
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")


def run_tool(main: Callable[[], None], *, log: bool = True) -> None:
    """Call ``main``, and print a one-line error instead of a traceback if the user can fix the cause.

    * ``ConfigError`` (also from a child process) and ``OSError``: ``error: ...``, exit status 1
    * A child process was killed: ``error: ...``, exit status 1 or the status of the child process
    * Ctrl-C: ``interrupted``, exit status 130
    * Another signal: ``ended by SIGTERM``, exit status 128 plus the number of the signal
    * Any other exception: a traceback

    Temporary files are deleted in all cases. Under torchrun, only the first process on each machine prints the error.

    Args:
        main: Main function of the command.
        log: Write log records of this project and warnings of other libraries to stderr.
    """
    # This must be set before PyTorch loads OpenMP. Threads that spin too long occupy the cores of other processes, and
    # threads that never spin start late.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"
    # A closed terminal must not end a run, which also logs to a file.
    logging.raiseExceptions = False
    try:
        with _usable_streams(), _exit_on_signals(), _log_to_stderr() if log else nullcontext():
            main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            print(f"ended by {signal.Signals(end.code - 128).name}", file=sys.stderr)
        raise
    except Exception as error:
        reason = _explain(error)
        if reason is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # torchrun ends this process during the wait if the first process on this machine has the same error.
            time.sleep(_TORCHRUN_SECONDS)
        print(f"error: {printable(reason[0])}", file=sys.stderr)
        sys.exit(reason[1])


@contextmanager
def _usable_streams() -> Iterator[None]:
    """Make printing work for a closed stdout or stderr and for any character. Report a full disk as an error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # This also reserves the file descriptor. Otherwise libraries could print into another file.
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))
    # Python does the same for stderr.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Python flushes stdout again at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            error.filename = "standard output"
            raise


def _explain(error: Exception) -> tuple[str, int] | None:
    """Return the error message and the exit status for an exception, or ``None`` if the exception is a bug."""
    text = str(error).strip()
    lines = text.splitlines()
    if isinstance(error, ConfigError) or (lines and lines[-1].startswith(_REMOTE)):
        return _with_flag(text.rpartition(_REMOTE)[2]), 1
    if isinstance(error, ImportError) and "libGL.so" in text:
        advice = "Install libgl1, or opencv-python-headless instead of opencv-python."
        return f"OpenCV cannot be loaded: {text}. {advice}", 1
    if isinstance(error, ModuleNotFoundError) and error.name == "detectron2":
        return "detectron2 is not installed. Run 'vil install-detectron2'.", 1
    if hasattr(error, "exit_status"):
        return lines[-1], error.exit_status
    if lines and lines[-1].startswith("DataLoader worker"):
        # torch's message if a data loader process was killed.
        return f"{lines[-1].strip()} The memory may be too small. Lower DATALOADER.NUM_WORKERS.", 1
    if isinstance(error, MemoryError) or "allocate memory" in text or type(error).__name__ == "OutOfMemoryError":
        return " ".join(["The memory is too small. Use a smaller batch or smaller images.", *lines]), 1
    cause = find_os_error(error)
    if cause is None or (cause is not error and cause.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)):
        return None
    if cause.filename and cause.strerror:
        return f"{cause.filename}: {cause.strerror}", 1
    # Errors without a file name come from shared memory, file descriptors and sockets.
    hints = {errno.EROFS: ". Make /dev/shm writable.", errno.EMFILE: ". Raise 'ulimit -n'."}
    socket = ". Set TMPDIR (for Ray, RAY_TMPDIR) to a folder with a shorter path." * ("AF_UNIX" in text)
    return " ".join(lines) + hints.get(cause.errno or 0, socket), 1


def _with_flag(message: str) -> str:
    """Name the flags that the user gave instead of arguments of the library, and next to the first config key."""
    given = {word.partition("=")[0] for word in sys.argv}

    def as_flag(name: re.Match) -> str:
        flag = f"--{name[0].replace('_', '-')}"
        return flag if flag in given else name[0]

    # The first word, or words with an underscore. Parts of paths do not match.
    message = re.sub(r"^\w+(?=[=:\s])|(?<![\w'/.-])[a-z]+(_[a-z]+)+(?=[=:,;\s]|\.$|\.\s)", as_flag, message)
    for flag, key in _FLAGS.items():
        if flag in given and flag not in message:
            if f"({key})" in message:
                message = message.replace(f"({key})", f"({flag}, {key})")
            else:
                message = re.sub(rf"\b{re.escape(key)}\b", f"{flag} ({key})", message, count=1)
    return message


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit at SIGTERM, SIGHUP, SIGUSR1 and SIGXCPU, unless they are ignored or have a handler."""
    with ExitStack() as restored:
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
                restored.callback(signal.signal, number, signal.SIG_DFL)
        yield


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Write log records of this project and warnings of other libraries to stderr, one per line."""
    names = ("projects_vil", "backbones")

    def select(record: logging.LogRecord) -> bool:
        record.prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        record.line = printable(record.getMessage())
        return record.levelno >= logging.WARNING or record.name.startswith(names)

    handler = logging.StreamHandler()
    handler.addFilter(select)
    handler.setFormatter(logging.Formatter("%(prefix)s%(line)s"))
    logging.getLogger().addHandler(handler)
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        for name in names:
            logging.getLogger(name).setLevel(logging.NOTSET)
