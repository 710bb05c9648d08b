"""Arguments that the commands share, and the error handling of a command.

This module does not import PyTorch. A command parses its arguments before it imports the library, so ``--help`` and
errors in the arguments appear at once.
"""

import argparse
import difflib
import errno
import functools
import glob
import json
import logging
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from backbones.errors import (
    GENERATOR,
    ConfigError,
    check_replaceable,
    closest,
    find_os_error,
    handling_signals,
    printable,
    terminate,
)
from vil import choices

# First parts of all config keys.
SECTIONS = frozenset(
    "CUDNN_BENCHMARK DATALOADER DATASETS FLOAT32_PRECISION GLOBAL INFERENCE INPUT LOGGING MODEL OUTPUT_DIR "
    "OVERWRITE_OUTPUT_DIR SEED SOLVER TEST VERSION VIS_PERIOD".split()
)
# A misspelled key such as SOLVR.BASE_LR is accepted as a key, so that the error suggests the closest one.
_LIKE_A_KEY = re.compile(r"([A-Z][A-Z0-9_]+)(\.[A-Z][A-Z0-9_]*)+")
# Start of the last line in the traceback text of another process.
_REMOTE = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
_DATA_ADVICE = "Give the output directory of a run. For a dataset: vil check, vil train, or vil eval RUN DATA"
# Seconds that a process under torchrun waits, so that only the first process on each machine prints a common error.
_TORCHRUN_SECONDS = 10


# Types of arguments --------------------------------------------------------------------------------------------------


def existing_path(text: str) -> str:
    """Return ``text`` if it is an existing file or folder, or a URL. This is an argparse type."""
    if "://" not in text and not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"'{text}' does not exist. Check the path")
    return text


def dataset_path(text: str) -> str:
    """Return ``text`` if it exists and is not the output directory of a run. This is an argparse type."""
    if Path(text, "last_checkpoint").is_file():
        raise argparse.ArgumentTypeError(f"'{text}' is a run. Write DATA --weights {text}, or --resume --output {text}")
    return existing_path(text)


def weights_file(text: str) -> str:
    """Return ``text`` if it is an existing path, a URL, "none", or a name in the model zoo."""
    if text == "none" or "://" in text or Path(text).exists() or "VIL_ZOO" in os.environ:
        return text
    if re.fullmatch(r"\w+", text):
        import yaml

        names = {name for group in yaml.safe_load(choices.ZOO.read_text(encoding="utf-8")) for name in group["files"]}
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"'{text}' is not a path or a name in the model zoo{closest(text, names)}")
    is_hub = text.count("/") == 1 and not Path(text).parent.exists()
    hub = ". To load from the Hugging Face Hub, use Detector.from_pretrained" if is_hub else ""
    raise argparse.ArgumentTypeError(f"'{text}' does not exist. Check the path{hub}")


def model_source(text: str) -> str:
    """Return ``text`` if it is a name in the model zoo, a URL, a file, or a folder with a config."""
    if Path(text).is_dir() and not Path(text, "config.yaml").is_file():
        raise argparse.ArgumentTypeError(f"'{text}' has no config.yaml, so it is not a run. {_DATA_ADVICE}")
    return weights_file(text)


def config_name(text: str) -> str:
    """Return ``text`` if it is an existing file, or the name of a config of this project."""
    names = {path.relative_to(choices.CONFIGS).with_suffix("").as_posix() for path in choices.CONFIGS.rglob("*.yaml")}
    if not Path(text).is_file() and text.removesuffix(".yaml") not in names:
        raise argparse.ArgumentTypeError(f"there is no config '{text}'{closest(text, names) or '. Check the path'}")
    return text


def image_source(text: str) -> str:
    """Return ``text`` if it is an existing path, a URL, a camera number, or a pattern with * or {000..127}."""
    return text if text.isdecimal() or "{" in text or glob.glob(text) else existing_path(text)


def local_path(text: str) -> str:
    """Return the path of an output unless it is a URL. This is an argparse type."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"cannot write to the URL '{text}'. Give a local path")
    return text


def output_folder(text: str) -> str:
    """Return ``text`` unless it is a URL or an existing file. This is an argparse type."""
    if os.path.exists(local_path(text)) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"Output '{text}' is a file. Choose a folder")
    return text


def output_file(text: str) -> str:
    """Return ``text`` if a file can be written at this path. This is an argparse type.

    An existing file is overwritten only if an earlier command wrote it.
    """
    path = Path(local_path(text)).absolute()
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


not_negative = functools.partial(positive, least=0)


def image_size(text: str) -> int | str:
    """Return an image size in pixels, or ``"auto"``. This is an argparse type."""
    smallest, largest = choices.IMAGE_SIZES
    if text != "auto" and not (text.isdecimal() and smallest <= int(text) <= largest):
        raise argparse.ArgumentTypeError(f"'{text}' is not auto or a whole number from {smallest} to {largest}")
    return text if text == "auto" else int(text)


def fraction(text: str) -> float:
    """Return a number of at least 0 and below 1. This is an argparse type."""
    if not re.fullmatch(r"[\d.]+(e-?\d+)?", text) or float(text) >= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number between 0 and 1, such as 0.2")
    return float(text)


def shard(text: str) -> tuple[int, int]:
    """Return I and N of a shard ``I/N``. This is an argparse type."""
    if not re.fullmatch(r"\d+/\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard. Write I/N, such as 0/16")
    number, total = text.split("/")
    return int(number), int(total)


# Parsers -------------------------------------------------------------------------------------------------------------


class ToolParser(argparse.ArgumentParser):
    """Parser that prints a docstring as help, and each error as one line with exit status 2.

    Options can be in any position, also between two positional arguments.

    Args:
        description: Docstring of the command, with an example.
    """

    def __init__(self, description: str | None, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False, **options)
        self._section: argparse._ActionsContainer = self

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        # A shell does not expand ~ in quotes or in --output=~/x.
        words = [
            re.sub(r"^(--[\w-]+=)?(~[^/]*)", lambda match: (match[1] or "") + os.path.expanduser(match[2]), word)
            for word in (sys.argv[1:] if args is None else args)
        ]
        return self._parse(words)

    def _parse(self, words: Sequence[str]) -> argparse.Namespace:
        # argparse cannot intermix the arguments of a subcommand or another program.
        rest = any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)
        parse = self.parse_known_args if rest else self.parse_known_intermixed_args
        parsed, unknown = parse(words)
        if unknown:
            self._unknown([word for word in unknown if word.startswith("-")] or unknown[:1])
        return parsed

    def _unknown(self, words: Sequence[str]) -> NoReturn:
        self.error("; ".join(f"unknown argument '{word}'{self._hint(word)}" for word in words))

    def section(self, title: str) -> None:
        """Add the arguments that follow to a section of the help."""
        self._section = self.add_argument_group(title)

    def add(self, name: str, help_text: str, **options: Any) -> None:
        """Add an argument with its help. A whole number is shown as ``N``."""
        if options.get("type") in (positive, not_negative):
            options.setdefault("metavar", "N")
        self._section.add_argument(name, help=help_text, **options)

    def check(self, name: str, check: Callable[[str], object], value: str) -> None:
        """Print an error about the argument ``name`` unless an argparse type accepts its value."""
        try:
            check(value)
        except argparse.ArgumentTypeError as error:
            self.error(f"argument {name}: {error}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the closest choice."""
        if action.choices is not None and value not in action.choices:
            name = choices.NAMES_OF_OTHERS.get(str(value).lower(), str(value).lower())
            hint = closest(name, action.choices, cutoff=0.6) or f". Choose from {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, f"unknown value '{value}'{hint}")

    def _hint(self, word: str) -> str:
        """Return advice for an unknown argument: the argument or key with this name in this project."""
        flag, _, value = word.partition("=")
        other_name = flag.lstrip("-").replace("-", "_")
        name = choices.NAMES_OF_OTHERS.get(other_name, other_name)
        if word.endswith(choices.EXPORT_SUFFIXES) and "--output" in self._option_string_actions:
            return ". Write --output DIR to choose the folder of the results"
        same = f"--{name.replace('_', '-')}"
        if (action := self._option_string_actions.get(same)) is not None:
            values = value or self._get_formatter()._format_args(action, "VALUE")
            return f". Write {same} {values}".rstrip()
        if any(name == action.dest and not action.option_strings for action in self._actions):
            return f". Write {value}" if value else f". Write the path without '{flag}'"
        starts = [option for option in self._option_string_actions if option.startswith(flag)]
        if starts and word.startswith("--") and name == other_name:
            return closest(flag, starts, cutoff=0)
        if (hint := self._key_hint(name, value)) or word.startswith("-"):
            no_option = ". This command has no such option" * (name != other_name)
            return hint or no_option or closest(flag, self._option_string_actions, cutoff=0.7)
        names = [str(action.metavar) for action in self._actions if not action.option_strings]
        return f". The command takes only {' and '.join(names)}. Quote a path that has spaces" * bool(names)

    def _key_hint(self, name: str, value: str) -> str:
        """Return advice for an unknown argument that may be meant as a config key."""
        return ""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"error: {printable(message[:1].upper() + message[1:])}{end} Add --help to list all arguments.\n")


class ConfigToolParser(ToolParser):
    """Parser that also accepts config keys as ``KEY VALUE`` pairs, in any position, with or without ``--opts``.

    After parsing, ``args.overrides`` is a dict of all pairs. ``--weights`` and ``--device`` are added as
    ``MODEL.WEIGHTS`` and ``MODEL.DEVICE``.

    Args:
        description: Docstring of the command, with an example.
        config_file: Add ``--config-file FILE``.
        weights: Add ``--weights FILE``.
        devices: Device types that the command supports. If there are any, ``--device`` is added.
    """

    def __init__(
        self,
        description: str | None,
        *,
        config_file: bool = True,
        weights: bool = False,
        devices: Sequence[str] = choices.DEVICES,
        **options: Any,
    ) -> None:
        epilog = "KEY VALUE pairs in any position override config keys (docs/training.md), such as SOLVER.BASE_LR 5e-5."
        super().__init__(description, epilog=epilog, **options)
        if config_file:
            self.add("--config-file", "model config", type=existing_path, metavar="FILE")
        if weights:
            self.add("--weights", "checkpoint, or name in the model zoo (config key MODEL.WEIGHTS)", metavar="FILE")
        if devices:
            default = "; default: the device of the config, or cpu without a GPU" if "cuda" in devices else ""
            self.add("--device", f"{' or '.join(devices)} (config key MODEL.DEVICE{default})", metavar="DEVICE")

    def _key_hint(self, name: str, value: str) -> str:
        is_key = name.isupper() or name.upper() in SECTIONS or ("." in name and _is_key(name.upper()))
        key = name.upper() if is_key else choices.KEYS.get(name, "")
        if key.startswith("SOLVER.") and not {"--epochs", "--resume"} & self._option_string_actions.keys():
            return ". This command does not train. Remove it"
        if key:
            return f". Write {key} {value or 'VALUE'}"
        return ". Write config keys as KEY VALUE, such as SOLVER.BASE_LR 5e-5" if value else ""

    def _parse(self, words: Sequence[str]) -> argparse.Namespace:
        words, given = self._split(words)
        parsed = super()._parse(words)
        for name in ("weights", "device"):
            key, value = choices.KEYS[name], getattr(parsed, name, None)
            if value is not None and given.setdefault(key, value) != value:
                self.error(f"--{name} {value} and {key} {given[key]} set the same config key. Remove one of them")
        if given.get("MODEL.WEIGHTS"):
            name = "--weights" if getattr(parsed, "weights", None) else "MODEL.WEIGHTS"
            self.check(name, weights_file, given["MODEL.WEIGHTS"])
        parsed.overrides = given
        if hasattr(parsed, "weights"):
            parsed.weights = given.get("MODEL.WEIGHTS")
        return parsed

    def _split(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of the command, and the config keys and values."""
        arguments: list[str] = []
        overrides: dict[str, str] = {}
        unknown: list[str] = []
        left = iter(words)
        for word in left:
            action = self._option_string_actions.get(arguments[-1]) if arguments else None
            is_value = action is not None and action.nargs is None
            if word in ("--opts", "--cfg-options"):
                continue
            is_path = is_value or Path(word).exists()
            if is_path or not _is_key(word):
                if not is_path and (re.match(r"[a-z][\w.]*=", word) or ("_" in word and _is_key(word.upper()))):
                    unknown.append(word)
                arguments.append(word)
                continue
            value = next(left, None)
            if "=" in word:
                self.error(f"the override '{word}' has an '='. Write {word.replace('=', ' ', 1)}")
            is_key = value is not None and value.partition(".")[0] in SECTIONS and ("." in value or "_" in value)
            if value is None or value.startswith("--") or (is_key and not Path(value).exists()):
                self.error(f"the override {word} has no value. Write {word} VALUE")
            overrides[word] = value
        if unknown:
            self._unknown(unknown)
        return arguments, overrides


def _is_key(word: str) -> bool:
    """Return whether a word, such as ``SEED``, ``SOLVER.BASE_LR`` or ``SOLVR.BASE_LR=1``, is meant as a config key."""
    section = word.partition("=")[0].partition(".")[0]
    like = _LIKE_A_KEY.fullmatch(word.partition("=")[0])
    return section in SECTIONS or bool(like and difflib.get_close_matches(section, SECTIONS, cutoff=0.75))


def add_training_arguments(parser: ToolParser) -> None:
    """Add the arguments of detectron2's ``default_argument_parser``, except for overrides."""
    parser.add("--config-file", "config", default="", required=True, type=existing_path, metavar="FILE")
    add_resume_argument(parser)
    parser.add("--eval-only", "evaluate MODEL.WEIGHTS instead of training", action="store_true")
    add_process_arguments(parser)


def add_resume_argument(parser: ToolParser) -> None:
    parser.add("--resume", "resume from the last checkpoint in the output directory", action="store_true")


def add_process_arguments(parser: ToolParser) -> None:
    """Add the arguments of detectron2's parser that describe the processes of a run."""
    parser.section("Several GPUs or machines")
    processes = "number of GPUs on this machine; with --device cpu, number of processes (default 1)"
    parser.add("--num-gpus", processes, type=int, default=1, metavar="N")
    parser.add("--num-machines", "number of machines (default 1)", type=int, default=1, metavar="N")
    parser.add("--machine-rank", "number of this machine, from 0", type=int, default=0, metavar="R")
    # As in detectron2, the default port depends on the user.
    user = os.getuid() if sys.platform != "win32" else 1
    url = f"tcp://127.0.0.1:{2**15 + 2**14 + hash(user) % 2**14}"
    parser.add("--dist-url", "tcp://HOST:PORT of the first of several machines", default=url, metavar="URL")
    timeout_help = "seconds to wait for the other machines at the start (default 600)"
    parser.add("--dist-timeout", timeout_help, type=positive, default=600, metavar="S")


def keywords(args: argparse.Namespace, *excluded: str) -> dict[str, Any]:
    """Return the arguments as keyword arguments of the library, without config keys and the ``excluded`` arguments."""
    excluded = (*excluded, "config_file", "device", "overrides", "weights")
    return {name: value for name, value in vars(args).items() if name not in excluded}


# Output, errors and signals ------------------------------------------------------------------------------------------


def show(*lines: object) -> None:
    """Print lines to stdout. Control characters, which file names may contain, are escaped."""
    for line in lines:
        print(printable(line))


def write_json(path: str | None, content: object) -> None:
    """Write ``content`` as JSON if ``path`` is set. A list is written as the value of ``rows``."""
    if path:
        from backbones.files import write_text

        content = {"generator": GENERATOR} | (content if isinstance(content, dict) else {"rows": content})
        write_text(path, json.dumps(content, indent=2) + "\n")


def run_tool(main: Callable[[], None], *, log: bool = True) -> None:
    """Call ``main``, and print a one-line error instead of a traceback if the user can fix the cause.

    * ``ConfigError`` (also from a child process) and ``OSError``: ``error: ...``, exit status 1
    * A child process was killed: ``error: ...``, exit status 1 or the status of the child process
    * Ctrl-C: ``interrupted``, exit status 130
    * Another signal: ``ended by SIGTERM``, exit status 128 plus the number of the signal
    * The reader of stdout ended, as in ``vil check photos | head``: no message, exit status 141
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
        exit_on_signals = handling_signals(terminate, only_default=True)
        with _usable_streams(), exit_on_signals, _log_to_stderr() if log else nullcontext():
            main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            print(f"ended by {signal.Signals(end.code - 128).name}", file=sys.stderr)
        raise
    except Exception as error:
        stdout = select.poll()
        stdout.register(1, 0)  # reports only errors
        if isinstance(error, BrokenPipeError) and (error.filename == "standard output" or stdout.poll(0)):
            sys.exit(128 + signal.SIGPIPE)
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
        return f"OpenCV cannot be loaded: {text}. Install libgl1, or opencv-python-headless instead.", 1
    if isinstance(error, ModuleNotFoundError) and error.name == "detectron2":
        return "detectron2 is not installed. Run 'vil install-detectron2'.", 1
    if hasattr(error, "exit_status"):
        return lines[-1], error.exit_status
    if lines and "DataLoader worker" in lines[-1]:
        # torch's message if a data loader process was killed, after the type of the error in a traceback.
        killed = lines[-1].rpartition("RuntimeError: ")[2].rstrip(".")
        return f"{killed}. The memory may be too small. Lower DATALOADER.NUM_WORKERS.", 1
    if isinstance(error, MemoryError) or "allocate memory" in text or type(error).__name__ == "OutOfMemoryError":
        return " ".join(["The memory is too small. Use a smaller batch or smaller images.", *lines]), 1
    cause = find_os_error(error)
    if cause is None:
        return None
    if cause.filename and cause.strerror:
        return f"{cause.filename}: {cause.strerror}", 1
    # Errors without a file name come from shared memory, file descriptors and sockets.
    hints = {errno.EROFS: ". Make /dev/shm writable.", errno.EMFILE: ". Raise 'ulimit -n'."}
    socket = ". Set TMPDIR (for Ray, RAY_TMPDIR) to a folder with a shorter path." * ("AF_UNIX" in text)
    return " ".join(lines) + hints.get(cause.errno or 0, socket), 1


def _with_flag(message: str) -> str:
    """Replace argument names of the library by the flags that the user gave. Add the flag to its config key."""
    given = {word.partition("=")[0] for word in sys.argv}

    def as_flag(name: re.Match) -> str:
        flag = f"--{name[0].replace('_', '-')}"
        return flag if flag in given else name[0]

    # The first word, or words with an underscore. Parts of paths do not match.
    message = re.sub(r"^\w+(?=[=:\s])|(?<![\w'/.-])[a-z]+(_[a-z]+)+(?=[=:,;\s]|\.$|\.\s)", as_flag, message)
    for name, key in choices.KEYS.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in given and flag not in message:
            if f"({key})" in message:
                message = message.replace(f"({key})", f"({flag}, {key})")
            else:
                message = re.sub(rf"\b{re.escape(key)}\b", f"{flag} ({key})", message, count=1)
    return message


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
