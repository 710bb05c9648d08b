"""The arguments that the tools share, and how a tool ends.

Nothing here imports PyTorch: a tool parses its arguments first and imports what it works with in ``main``, so that
``--help``, an unknown argument and a misspelt path answer at once.
"""

import argparse
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
from vil.choices import DEVICES

if TYPE_CHECKING:
    from detectron2.config import CfgNode

# Arguments that stand for a config key.
SHORT_FORMS = {"weights": "MODEL.WEIGHTS", "device": "MODEL.DEVICE"}
# Arguments that other programs for training have, and the config keys that do the same.
_KEYS_OF_OTHERS = {
    **dict.fromkeys(("--batch", "--batch-size"), "SOLVER.IMS_PER_BATCH {}"),
    "--epochs": "SOLVER.EPOCHS {}",
    **dict.fromkeys(("--img-size", "--imgsz"), "INPUT.MIN_SIZE_TRAIN '({},)'"),
    **dict.fromkeys(("--learning-rate", "--lr"), "SOLVER.BASE_LR {}"),
    "--max-iter": "SOLVER.MAX_ITER {}",
    **dict.fromkeys(("--output", "--output-dir"), "OUTPUT_DIR {}"),
    "--seed": "SEED {}",
    "--weights": "MODEL.WEIGHTS {}",
    "--workers": "DATALOADER.NUM_WORKERS {}",
}
# The first parts of all config keys.
SECTIONS = frozenset(
    (
        *("CUDNN_BENCHMARK", "DATALOADER", "DATASETS", "FLOAT32_PRECISION", "GLOBAL", "INFERENCE", "INPUT", "LOGGING"),
        *("MODEL", "OUTPUT_DIR", "OVERWRITE_OUTPUT_DIR", "SEED", "SOLVER", "TEST", "VERSION", "VIS_PERIOD"),
    )
)
# The beginning of the last line of a traceback that comes as text from another process.
_REMOTE = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
# How long a process that torchrun has started waits for the first one on its machine to end with the same error.
_TORCHRUN_SECONDS = 10


# Types of arguments --------------------------------------------------------------------------------------------------


# Only for a missing file like these the others in its folder are compared: a folder of photos may have very many.
_CONFIGS = (".py", ".yaml", ".yml")


def existing_path(text: str) -> str:
    """Return a path of a file or folder that is there, or a URL; an argparse type."""
    if "://" not in text and not Path(text).exists():
        path = Path(text)
        siblings = path.parent.glob(f"*{path.suffix}") if path.suffix in _CONFIGS else ()
        near = closest(path.name, [sibling.name for sibling in siblings])
        raise argparse.ArgumentTypeError(f"there is no file or folder {text}{near}")
    return text


def weights_file(text: str) -> str:
    """Return a path of a file or folder that is there, a URL, or what may be a name of the model zoo."""
    return text if re.fullmatch(r"\w+", text) else existing_path(text)


def image_source(text: str) -> str:
    """Return an existing path, a URL, the number of a camera, or a pattern {000..127}; an argparse type."""
    return text if text.isdecimal() or "{" in text else existing_path(text)


def output_file(text: str) -> str:
    """Return a path at which a file can be written; an argparse type.

    A file of that name is replaced only if an earlier command wrote it.
    """
    path = Path(text).absolute()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    try:
        check_replaceable(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return text


def positive(text: str) -> int:
    """Return a whole number of at least 1; an argparse type."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def shard(text: str) -> tuple[int, int]:
    """Return the numbers of ``I/N``; an argparse type."""
    if not re.fullmatch(r"\d+/\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, as 0/16")
    number, total = text.split("/")
    return int(number), int(total)


def _is_same_file(first: str, second: str) -> bool:
    """Whether two paths lead to one file, also by links."""
    return os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second)


# Parsers -------------------------------------------------------------------------------------------------------------


class ToolParser(argparse.ArgumentParser):
    """A parser whose help is a tool's docstring, and whose errors are one line with exit status 2.

    Args:
        description: the tool's docstring, with an example.
    """

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        # No shell expands ~ in quotes, or in --output=~/x.
        words = args = [
            re.sub(r"^(--[\w-]+=)?(~[^/]*)", lambda found: (found[1] or "") + os.path.expanduser(found[2]), word)
            for word in (sys.argv[1:] if args is None else args)
        ]
        known = {*SECTIONS, *self._option_string_actions}
        # Before argparse complains about the required one that was misspelt. Others parse a remainder and subcommands.
        if any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._actions):
            words = []
        unknown = [
            flag
            for word in words
            if (flag := word.partition("=")[0]).startswith("--") and flag not in {*known, "--", "--opts"}
        ]
        if not unknown:
            parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]}{self._hint(unknown[0], args)}")
        json_path = getattr(parsed, "json", None)
        others = [value for name, value in vars(parsed).items() if name != "json" and isinstance(value, str)]
        if json_path and any(value == json_path or _is_same_file(value, json_path) for value in others):
            self.error(f"argument --json: {json_path} is already another argument of this command: name another file")
        return parsed

    def _hint(self, flag: str, words: Sequence[str]) -> str:
        return closest(flag, {*SECTIONS, *self._option_string_actions})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {printable(message)} (--help lists all arguments)\n")


class ConfigToolParser(ToolParser):
    """The parser of a tool that takes config keys: ``KEY VALUE`` pairs, bare or after ``--opts``, in any position.

    ``args.opts`` has all pairs after parsing, also those of ``--weights`` and ``--device``, which are short forms of
    ``MODEL.WEIGHTS`` and ``MODEL.DEVICE``.

    Args:
        description: the tool's docstring, with an example.
        config_file: whether ``--config-file FILE`` is added.
        config_required: whether it must be given.
        weights: whether ``--weights FILE`` is added.
        devices: types of device on which the tool can run a model; ``--device`` is added where there is any.
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
        epilog = "KEY VALUE pairs override config keys; they may be in any position, bare or after --opts."
        super().__init__(description, epilog=epilog, **options)
        self.set_defaults(devices=tuple(devices))
        if config_file:
            options = {"required": config_required, "type": existing_path, "metavar": "FILE"}
            self.add_argument("--config-file", **options, help="config of the model")
        if weights:
            self.add_argument("--weights", metavar="FILE", help="short for MODEL.WEIGHTS: checkpoint, export or name")
        if devices:
            self.add_argument("--device", metavar="DEVICE", help=f"short for MODEL.DEVICE: {' or '.join(devices)}")

    def parse_known_args(
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
                self.error(f"--{name} {value} and {key} {given[key]} are the same setting: leave one out")
            overrides += [key, value]
            given[key] = value
        try:
            weights_file(given.get("MODEL.WEIGHTS") or "://")
        except argparse.ArgumentTypeError as error:
            self.error(f"MODEL.WEIGHTS: {error}")
        parsed.opts = overrides
        return parsed, unknown

    def _hint(self, flag: str, words: Sequence[str]) -> str:
        if flag not in _KEYS_OF_OTHERS or "--eval-only" not in self._option_string_actions:
            return super()._hint(flag, words)
        value = re.search(rf"(?<!\S){flag}[ =](?!--)(\S+)", " ".join(words))
        return f": write {_KEYS_OF_OTHERS[flag].format(value[1] if value else 'VALUE')}"

    def _split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the tool's own arguments, and keys and values."""
        arguments: list[str] = []
        overrides: list[str] = []
        left = iter(words)
        for word in left:
            action = self._option_string_actions.get(arguments[-1]) if arguments else None
            is_value = action is not None and action.nargs is None
            if word == "--opts":
                continue
            if is_value or word.partition("=")[0].partition(".")[0] not in SECTIONS or Path(word).is_file():
                arguments.append(word)
                continue
            value = next(left, None)
            if "=" in word:
                self.error(f"the override {word} is one word: write {word.replace('=', ' ', 1)}")
            is_key = value is not None and value.partition(".")[0] in SECTIONS and ("." in value or "_" in value)
            if value is None or value.startswith("--") or (is_key and not Path(value).exists()):
                self.error(f"the override {word} has no value")
            overrides += [word, value]
        return arguments, overrides


def add_training_arguments(parser: ToolParser) -> None:
    """Add the arguments of detectron2's ``default_argument_parser``, except for its overrides."""
    parser.add_argument("--config-file", default="", required=True, type=existing_path, metavar="FILE", help="config")
    add_resume_argument(parser)
    parser.add_argument("--eval-only", action="store_true", help="evaluate the weights of the config, do not train")
    add_process_arguments(parser)


def add_resume_argument(parser: ToolParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output folder")


def add_process_arguments(parser: ToolParser) -> None:
    """Add the arguments of detectron2's parser for the processes of a run."""
    processes = "processes on this machine: one for each GPU, or that many on the CPU where the device is cpu"
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help=processes)
    parser.add_argument("--num-machines", type=int, default=1, metavar="N", help="number of machines")
    parser.add_argument("--machine-rank", type=int, default=0, metavar="R", help="rank of this machine, from 0")
    # As in detectron2, a port of each user's own.
    user = os.getuid() if sys.platform != "win32" else 1
    url, address = f"tcp://127.0.0.1:{2**15 + 2**14 + hash(user) % 2**14}", "tcp://HOST:PORT of the first machine"
    parser.add_argument("--dist-url", default=url, metavar="URL", help=f"{address}, the same on all machines")
    timeout_help = "seconds to wait for the other machines at the start (default 600)"
    parser.add_argument("--dist-timeout", type=positive, default=600, metavar="S", help=timeout_help)


def process_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`add_process_arguments` as keywords."""
    names = ("num_gpus", "num_machines", "machine_rank", "dist_url", "dist_timeout")
    return {name: getattr(args, name) for name in names}


def config_of(args: argparse.Namespace, path: str | Path | None = None) -> "CfgNode":
    """Return a config with the overrides of a command, on a device that is available.

    Args:
        args: parsed by a :class:`ConfigToolParser` with devices.
        path: a config; by default the one of ``--config-file``.

    Raises:
        ConfigError: as ``load_config``, and if a requested device is not available.
    """
    from projects_vil.config import choose_device, load_config

    requested = SHORT_FORMS["device"] in args.opts[::2]
    return choose_device(load_config(path or args.config_file, args.opts), devices=args.devices, requested=requested)


# How a tool ends -----------------------------------------------------------------------------------------------------


def show(*lines: object) -> None:
    """Print lines to stdout, with what names of files may have in them escaped."""
    for line in lines:
        print(printable(line))


def write_json(path: str | None, content: object) -> None:
    """Write ``content`` where ``--json`` asked for it; a list is written as ``rows``."""
    if path:
        from backbones.checkpoint_files import atomic_write

        content = {"generator": GENERATOR} | (content if isinstance(content, dict) else {"rows": content})
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")


def run_tool(main: Callable[[], None], *, log: bool = True) -> None:
    """Call ``main``, and end the process in one line where its user can do something about the reason.

    A :class:`ConfigError`, also one from a child process, an ``OSError`` and a killed child process become ``error:
    ...`` on stderr and exit status 1 (a training process that was killed: its status), Ctrl-C has the status 130,
    and other signals to end 128 + their number, after ``finally`` clauses have removed temporary files. Any other
    exception keeps its traceback. Under torchrun an error that all processes have is printed by the first one on each
    machine.

    Args:
        main: the tool's main function.
        log: whether this project's log records and others' warnings go to stderr; a training run logs by itself.
    """
    # Before PyTorch loads OpenMP. Waiting threads that spin for long take the cores of other processes, and those that
    # never spin start late.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"
    # A run need not end because its terminal does, and logs are written to files too.
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
            # torchrun ends this process before it prints what the first one on its machine has found too.
            time.sleep(_TORCHRUN_SECONDS)
        print(f"error: {printable(reason[0])}", file=sys.stderr)
        sys.exit(reason[1])


@contextmanager
def _usable_streams() -> Iterator[None]:
    """Replace a closed stdout or stderr, print any character to an open one, and report what cannot be printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Also so that no other file gets the number that libraries print to.
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))
    # As Python does with stderr.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Python tries again when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            error.filename = "standard output"
            raise


def _explain(error: Exception) -> tuple[str, int] | None:
    """Return the line and the exit status for an exception that is not a bug; None for one that is."""
    text = str(error).strip()
    lines = text.splitlines()
    if isinstance(error, ConfigError) or (lines and lines[-1].startswith(_REMOTE)):
        return _with_flag(text.rpartition(_REMOTE)[2]), 1
    if isinstance(error, ImportError) and "libGL.so" in text:
        return f"OpenCV cannot be loaded: {text}. Install libgl1, or opencv-python-headless instead of opencv-python", 1
    if isinstance(error, ModuleNotFoundError) and error.name == "detectron2":
        return "detectron2 is not installed, and it is not on the package index: run `vil install-detectron2`", 1
    if hasattr(error, "exit_status"):
        return lines[-1], error.exit_status
    if lines and lines[-1].startswith("DataLoader worker"):
        # torch's message where one was killed.
        return f"{lines[-1].strip()} Often memory is short: lower DATALOADER.NUM_WORKERS", 1
    if isinstance(error, MemoryError) or "allocate memory" in text or type(error).__name__ == "OutOfMemoryError":
        return f"memory is too small: {' '.join(lines)}", 1
    cause = find_os_error(error)
    if cause is None or (cause is not error and cause.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)):
        return None
    if cause.filename and cause.strerror:
        return f"{cause.filename}: {cause.strerror}", 1
    # Without the name of a file, these come from what processes and threads share.
    hints = {errno.EROFS: " (/dev/shm must be writable)", errno.EMFILE: " (raise `ulimit -n`)"}
    socket = " (set TMPDIR, or for Ray RAY_TMPDIR, to a folder with a shorter path)" * ("AF_UNIX" in text)
    return " ".join(lines) + hints.get(cause.errno, socket), 1


def _with_flag(message: str) -> str:
    """Write an argument that a function names at the beginning as its flag, where that was given: size -> --size."""
    given = {word.partition("=")[0] for word in sys.argv}

    def as_flag(name: re.Match) -> str:
        flag = f"--{name[0].replace('_', '-')}"
        return flag if flag in given else name[0]

    # Not the beginning of a path
    return re.sub(r"^\w+(?=[=:\s])", as_flag, message)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM, SIGHUP, SIGUSR1 and SIGXCPU raise SystemExit, unless they are ignored or handled otherwise."""
    with ExitStack() as restored:
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
                restored.callback(signal.signal, number, signal.SIG_DFL)
        yield


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Write this project's records and others' warnings to stderr, one per line."""
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
