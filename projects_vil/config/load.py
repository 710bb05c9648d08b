"""How a config file is read: one clear line for what is wrong with it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg
from detectron2.projects.point_rend import add_pointrend_config

from backbones.utils.errors import InputError, check_file, closest
from projects_vil.config.defaults import add_vil_config

# What detectron2 writes the whole config of a run into, in OUTPUT_DIR.
CONFIG_FILE = "config.yaml"


def default_config() -> CN:
    """detectron2's defaults, those of its PointRend, and this project's keys."""
    cfg = get_cfg()
    add_pointrend_config(cfg)
    # What it is for, INPUT.PHOTOMETRIC_DISTORTION does here.
    del cfg.INPUT["COLOR_AUG_SSD"]
    add_vil_config(cfg)
    return cfg


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> CN:
    """The keys of :func:`default_config`, the file (with its ``_BASE_`` chain) and the overrides, frozen.

    Args:
        path: a YAML config.
        overrides: keys and values by turns, as on detectron2's command line.

    Raises:
        InputError: for a missing file, bad YAML, an unknown key (naming the closest) or a value of a wrong type.
    """
    cfg = default_config()
    if not str(path):
        raise InputError("no config file was given: add --config-file configs/retinanet/vil_tiny_1x.yaml, say")
    check_file(path, "config file")
    try:
        cfg.merge_from_file(str(path), allow_unsafe=False)
    except RecursionError as error:
        raise InputError(f"{path}: its chain of _BASE_ leads back to itself") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no file {error.filename}, named as _BASE_") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a YAML config: {one_line(error)}") from error
    except (TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a config: keys and sub-keys with values are expected") from error
    except (KeyError, ValueError, AssertionError, OSError) as error:
        raise InputError(f"{path}: {_explain(error, cfg)}") from error
    pair = next((key for key in overrides[::2] if "=" in key), None)
    if pair is not None:
        key, _, value = pair.partition("=")
        raise InputError(f"the override {pair!r} is one word; a key and its value are two: {key} {value}")
    if len(overrides) % 2:
        raise InputError(f"overrides are keys and values by turns; {overrides[-1]!r} has no value")
    try:
        cfg.merge_from_list(list(overrides))
    except (TypeError, AttributeError) as error:
        raise InputError(f"an override names a key below a value: {' '.join(overrides)}") from error
    except (KeyError, ValueError, AssertionError) as error:
        raise InputError(f"{_explain(error, cfg)} (among the overrides {' '.join(overrides)})") from error
    cfg.freeze()
    return cfg


# yacs' words for a value of another type.
_MISMATCH = re.compile(
    r"Type mismatch \(<class '(?P<kind>\w+)'> vs\. <class '(?P<found>\w+)'>\) with values "
    r"\((?P<known>.*) vs\. (?P<given>.*?)\) for config key: (?P<key>[\w.]+)"
)
_KINDS = {
    "float": "a number with a point",
    "int": "a whole number",
    "str": "a text",
    "bool": "True or False",
    "tuple": "several values in brackets",
    "list": "a list",
}


def _explain(error: Exception, cfg: CN) -> str:
    if isinstance(error, OSError):
        return f"cannot read {error.filename}: {error.strerror}"
    message = one_line(error.args[0] if error.args else error)
    name = re.search(r"<class 'tuple'> vs\. <class 'str'>.*config key: (DATASETS\.(?:TRAIN|TEST))", message)
    if name is not None:
        value = re.search(r"vs\. (\S+)\)", message.partition("with values")[2])
        given = value[1] if value else "NAME"
        return f"{name[1]} is one name, {given}: add a comma, {name[1]} '(\"{given}\",)'"
    mismatch = _MISMATCH.fullmatch(message)
    if mismatch is not None:
        given, kind = mismatch["given"], _KINDS.get(mismatch["kind"], mismatch["kind"])
        # Whether the value is one that the key can have is for others to say.
        forms = {
            "float": f"; {given} with a point is {given}.0",
            "tuple": f': write "({given},)"',
            "list": f': write "[{given}]"',
        }
        instead = forms.get(mismatch["kind"], "") if mismatch["found"] == "int" else ""
        example = f", as {mismatch['known']}" if mismatch["known"] else ""
        return f"{mismatch['key']} is {given}, and it is {kind}{example}{instead}"
    match = re.search(r"Non-existent (?:config )?key: ([\w.]+)", message)
    if match is None:
        return message
    known = list(_keys(cfg))
    return f"unknown config key {match[1]}{closest(match[1], known) or closest(match[1].upper(), known)}"


def _keys(node: CN, prefix: str = "") -> Iterable[str]:
    for key, value in node.items():
        yield prefix + key
        if isinstance(value, CN):
            yield from _keys(value, f"{prefix}{key}.")


def one_line(message: object) -> str:
    """What a library says, without its line breaks, and without the middle where it is long."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}"
