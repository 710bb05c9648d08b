"""What lies in the folder of a run, as far as it can be read."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from backbones.utils.errors import InputError
from projects_vil.config import default_config, load_config

CONFIG, METRICS, EVALUATION, LOG = "config.yaml", "metrics.json", "evaluation.json", "log.txt"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RECORD = re.compile(r"\[\d\d/\d\d \d\d:\d\d:\d\d\] \S+ (?P<level>[A-Z]+): (?P<text>.*)")
_WARNING_LINES = 6  # of one warning


@dataclass(frozen=True)
class Run:
    """What a run left behind. What is missing or cannot be read is empty, and named in ``left_out``."""

    folder: Path
    cfg: CfgNode | None = None
    config_text: str = ""
    # Lines of metrics.json: name -> value, with "iteration" among them.
    metrics: list[dict[str, float]] = field(default_factory=list)
    # dataset -> task -> metric -> value
    evaluation: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    # Of the environment in which the run started last.
    versions: list[tuple[str, str]] = field(default_factory=list)
    # Warnings and errors of the log, and how often each was written.
    warnings: list[tuple[str, int]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_run(folder: Path, overrides: Sequence[str] = ()) -> Run:
    """Read a folder that training or evaluation wrote.

    Args:
        overrides: keys and values for its config, such as another place of the dataset.

    Raises:
        InputError: where the folder is not there, or nothing in it is of a run.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is {'a file' if folder.exists() else 'not there'}: name OUTPUT_DIR of a run")
    if not any((folder / name).is_file() for name in (CONFIG, METRICS, EVALUATION)):
        raise InputError(f"{folder} is no run: it has no {CONFIG}, {METRICS} or {EVALUATION}; name OUTPUT_DIR of one")
    left_out: list[str] = []
    cfg, config_text = _read_config(folder / CONFIG, overrides, left_out)
    log = _read_text(folder / LOG, "versions and warnings", left_out)
    return Run(
        folder=folder,
        cfg=cfg,
        config_text=config_text,
        metrics=_read_metrics(folder / METRICS, left_out),
        evaluation=_read_evaluation(folder / EVALUATION, left_out),
        versions=read_versions(log),
        warnings=read_warnings(log),
        left_out=left_out,
    )


def differences(cfg: CfgNode) -> list[tuple[str, str, str]]:
    """Keys, values and defaults where a config is not detectron2's and this project's defaults."""
    given, usual = _flat(cfg), _flat(default_config())
    return [(key, str(value), str(usual.get(key, ""))) for key, value in given.items() if usual.get(key) != value]


def read_versions(log: str) -> list[tuple[str, str]]:
    """The table that detectron2 writes of its environment, where a run starts: the last one."""
    _, found, rest = log.rpartition("Environment info:\n")
    if not found:
        return []
    rows: list[tuple[str, str]] = []
    for line in rest.splitlines()[1:]:
        if line.startswith("---"):
            break
        name, _, value = line.partition("  ")
        rows.append((name.strip(), value.strip()))
    return rows


def read_warnings(log: str) -> list[tuple[str, int]]:
    """Warnings and errors in the order of their first appearance, each once."""
    counted: Counter[str] = Counter()
    current: list[str] | None = None
    for line in [*log.splitlines(), "[00/00 00:00:00] end INFO: "]:
        record = _RECORD.match(line)
        if record is None:
            if current is not None:
                current.append(line)
            continue
        if current is not None:
            counted["\n".join(current[:_WARNING_LINES]).rstrip()] += 1
        current = [record["text"]] if record["level"] in ("WARNING", "ERROR", "CRITICAL") else None
    return list(counted.items())


def _flat(node: CfgNode, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, CfgNode):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _read_text(path: Path, content: str, left_out: list[str]) -> str:
    try:
        return _COLOR.sub("", path.read_text(errors="replace"))
    except FileNotFoundError:
        left_out.append(f"{content}: there is no {path.name}")
    except OSError as error:
        left_out.append(f"{content}: {path.name} cannot be read ({error.strerror})")
    return ""


def _read_config(path: Path, overrides: Sequence[str], left_out: list[str]) -> tuple[CfgNode | None, str]:
    text = _read_text(path, "configuration, and what is judged with the dataset that it names", left_out)
    if not text:
        return None, text
    try:
        return load_config(path, overrides), text
    except InputError as error:
        left_out.append(f"differences from the defaults, and what is judged with the dataset: {error}")
        return None, text


def _read_metrics(path: Path, left_out: list[str]) -> list[dict[str, float]]:
    text = _read_text(path, "curves", left_out)
    lines, broken = [], 0
    for line in text.splitlines():
        try:
            content = json.loads(line)
            content["iteration"] = int(content["iteration"])
        except (ValueError, TypeError, KeyError):
            broken += 1
        else:
            lines.append({name: value for name, value in content.items() if isinstance(value, (int, float))})
    if broken:
        left_out.append(f"{broken} of {broken + len(lines)} lines of {path.name}, which are damaged or cut off")
    elif path.is_file() and not lines:
        left_out.append(f"curves: {path.name} is empty")
    return lines


def _read_evaluation(path: Path, left_out: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    text = _read_text(path, "figures of the evaluation", left_out)
    if not text:
        return {}
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    by_dataset = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(tasks, dict) and all(isinstance(m, dict) for m in tasks.values()) for tasks in by_dataset):
        left_out.append(f"figures of the evaluation: {path.name} is damaged")
        return {}
    return content
