"""Shared arguments of the commands, and their error handling."""

import argparse
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from detectron2.engine import default_argument_parser

import vil.arguments
from backbones import ConfigError, create_backbone
from projects_vil.config import default_config, load_config
from tests.projects_vil.helpers import CONFIGS, ROOT, message
from vil import choices
from vil.arguments import ConfigToolParser, ToolParser, add_training_arguments, output_file, run_tool, write_json
from vil.cli import COMMANDS

FILE = ["--config-file", str(CONFIGS["retinanet"])]
OVERRIDES = {"SOLVER.BASE_LR": "-1e-3", "SOLVER.STEPS": "(3, 5)"}
PAIRS = [word for pair in OVERRIDES.items() for word in pair]
TOOLS = sorted({path.name for path in (ROOT / "tools").glob("*.py")})


# -- start-up --------------------------------------------------------------------------------------

# Arguments with a path that does not exist, for each tool that reads a path.
ABSENT = {
    "analyze_model.py": "--config-file absent",
    "benchmark.py": "--models vil_tiny_rpb MODEL.WEIGHTS absent.pth",
    "check_dataset.py": "absent",
    "convert_checkpoint.py": "absent.pth out.pth --model vil_tiny",
    "export_model.py": f"{' '.join(FILE)} --output out --weights absent.pth",
    "lazyconfig_train_net.py": "--config-file absent",
    "predict.py": f"{' '.join(FILE)} --input absent --output out",
    "report.py": "absent",
    "train_net.py": "--config-file absent",
    "visualize.py": "results absent",
}
# Runs tools in one process, which can use the library afterwards. Prints the exit status, whether torch or another slow
# library was imported, stdout and stderr.
_RUN = """
import contextlib, io, json, runpy, sys
results = []
for script, arguments in json.load(sys.stdin):
    sys.argv, status = [script, *arguments.split()], None
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code
    imported = not sys.modules.keys().isdisjoint({"torch", "torchvision", "timm", "detectron2"})
    results.append((status or 0, imported, out.getvalue(), err.getvalue()))
from projects_vil import Detector
from detectron2.modeling import BACKBONE_REGISTRY
assert "build_transformer_fpn_backbone" in BACKBONE_REGISTRY
print(json.dumps(results))
"""


def test_help_mistakes_and_dataset_commands_need_no_torch(shapes, tmp_path):
    calls = [(name, arguments) for name in TOOLS for arguments in ("--help", "--bogus", ABSENT.get(name)) if arguments]
    words = [f"{command} {word}" for command in ("", *COMMANDS) for word in ("--help", "--bogus")]
    words += ["absent", "train absent", "predict . absent --batch 2", "predict absent .", "eval absent"]
    calls += [("../vil/__main__.py", one) for one in (*words, "help train", "export absent", "train . --config absent")]
    datasets = f"check {shapes} --fix {tmp_path}/fixed", f"convert-dataset {shapes} {tmp_path}/yolo --format yolo"
    calls += [("../vil/__main__.py", one) for one in datasets]
    options = {"cwd": ROOT / "tools", "env": os.environ | {"PYTHONPATH": str(ROOT)}, "input": json.dumps(calls)}
    printed = subprocess.run([sys.executable, "-c", _RUN], **options, check=True, capture_output=True, text=True).stdout
    for (name, arguments), (status, imported, out, err) in zip(calls, json.loads(printed), strict=True):
        needs_help = arguments == "help train" or arguments.endswith("--help")
        assert (status, imported) == (0 if needs_help or arguments in datasets else 2, False), (name, arguments)
        if needs_help:
            is_alias = "vil" in name or "from vil.cli import main" in (ROOT / "tools" / name).read_text()
            example = "vil " if is_alias else f"python tools/{name}"
            assert "example" in out.lower() and example in out
        elif arguments not in datasets:
            assert err.splitlines()[-1].count("error: ") == 1
            assert "--bogus" in arguments or ("absent" in err and err.count("\n") == 1)


def test_training_has_detectron2s_arguments():
    parser = ToolParser("Train.")
    add_training_arguments(parser)
    ours, theirs = (
        {action.dest: (action.option_strings, action.default, action.nargs) for action in found._actions}
        for found in (parser, default_argument_parser())
    )
    assert theirs.pop("opts")[0] == [] and ours.pop("dist_timeout") and ours == theirs


def test_parsers_and_library_have_the_same_choices():
    from projects_vil import export

    # Some versions of detectron2 have more keys than others.
    assert default_config().keys() <= vil.arguments.SECTIONS
    assert choices.EXPORT_FORMATS == tuple(export.FORMATS)
    assert all(entry.suffix.endswith(choices.EXPORT_SUFFIXES) for entry in export.FORMATS.values())
    for name in ("export_coco", "run_onnx", "run_pt2", "sliced_sahi"):
        text = (ROOT / f"examples/{name}.py").read_text()
        assert f"(default {choices.SCORE_THRESHOLD})" in text and f"default={choices.SCORE_THRESHOLD}," in text, name


# -- overrides -------------------------------------------------------------------------------------


def parser(**options) -> ConfigToolParser:
    tool = ConfigToolParser("Do a thing.", weights=True, **options)
    tool.add_argument("--flag", action="store_true")
    tool.add_argument("--images", nargs="+", default=[])
    tool.add_argument("--size", nargs=2, type=int)
    return tool


def test_pairs_in_any_position():
    for word in ([], ["--opts"]):
        for order in itertools.permutations([FILE, [*word, *PAIRS], ["--flag", "--size", "4", "5"]]):
            args = parser().parse_args([token for part in order for token in part])
            assert args.overrides == OVERRIDES and args.config_file == FILE[1] and args.flag and args.size == [4, 5]


def test_an_option_stands_between_two_arguments():
    tool = parser()
    tool.add_argument("model")
    tool.add_argument("input", nargs="?")
    args = tool.parse_args(["run", *FILE, "SEED", "1", "--flag", "photos", "--size", "4", "5"])
    assert (args.model, args.input, args.flag, args.size) == ("run", "photos", True, [4, 5])
    assert args.overrides == {"SEED": "1"}


def test_pairs_next_to_lists_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEST.JPG").write_text("")
    (tmp_path / "DATASET.V2").mkdir()
    files = ["a.jpg", "DSC_01.JPG", "TEST.JPG", "DATASET.V2"]
    words = ["SEED", "1", "--config-file", FILE[1], "--images", *files, *PAIRS, "--opts", "SEED", "2"]
    args = parser().parse_args(words)
    assert args.images == files and args.overrides == OVERRIDES | {"SEED": "2"}
    assert parser().parse_args(FILE).overrides == {}


def test_a_misspelled_key_is_passed_on_to_the_library():
    args = parser().parse_args([*FILE, "SOLVR.BASE_LR", "1", "--flag"])
    assert args.overrides == {"SOLVR.BASE_LR": "1"} and args.flag
    assert "does not exist. Did you mean 'SOLVER.BASE_LR'" in message(load_config, FILE[1], args.overrides)


def test_short_forms_are_their_keys(tmp_path):
    weights = str(tmp_path / "a.pth")
    (tmp_path / "a.pth").touch()
    args = parser().parse_args([*FILE, "--weights", weights, "--device", "cpu", "SEED", "1", "MODEL.DEVICE", "cpu"])
    assert args.overrides == {"SEED": "1", "MODEL.DEVICE": "cpu", "MODEL.WEIGHTS": weights}
    cfg = load_config(args.config_file, args.overrides)
    assert (cfg.MODEL.WEIGHTS, cfg.MODEL.DEVICE, cfg.SEED) == (weights, "cpu", 1)
    url = "detectron2://ImageNetPretrained/MSRA/R-50.pkl"
    assert parser().parse_args([*FILE, "--weights", url]).overrides == {"MODEL.WEIGHTS": url}


@pytest.mark.parametrize(
    "words, advice",
    [
        ("SEED=3", "SEED 3"),
        ("MODLE.DEVICE OUTPUT_DIR out", "MODLE.DEVICE has no value"),
        ("MODEL.DEVICE cuda --device cpu", "--device cpu and MODEL.DEVICE cuda"),
        ("--weights absent.pth", "'absent.pth' does not exist"),
        (f"--output {ROOT}", f"--output: '{ROOT}' is a folder"),
        ("--config-file absent/vil_tiny1x.yaml", "'absent/vil_tiny1x.yaml' does not exist"),
        ("--batch-size=4", "Write SOLVER.IMS_PER_BATCH 4"),
        ("lr0=1 imgsz=9", "SOLVER.BASE_LR 1; unknown argument 'imgsz=9'. Write INPUT.MIN_SIZE_TEST 9"),
        ("my photos", "'photos'. The command takes only DATA. Quote"),
        ("cudnn_benchmark True", "Write CUDNN_BENCHMARK VALUE"),
        ("--epochs=12 --resum", "SOLVER.EPOCHS 12; unknown argument '--resum'. Did you mean '--resume'?"),
        ("--fr=0.2", "Unknown argument '--fr=0.2'. Did you mean '--fraction'?"),
        ("--kind yolo", "Choose from retinanet, mask_rcnn, faster_rcnn"),
        ("--kind Pascal", "Did you mean 'voc'?"),
        ("--cfg-options optimizer.lr=1", "Write config keys as KEY VALUE"),
        ("--solver.base-lr=1", "Write SOLVER.BASE_LR 1"),
        ("--data-path photos", "Write the path without '--data-path'"),
        ("--work-dir out", "Write --output VALUE"),
        ("--conf 0.5", "Unknown argument '--conf'. This command has no such option. Add --help"),
        ("--fraction 20", "'20' is not a number between 0 and 1, such as 0.2"),
        ("--size 20", "'20' is not auto or a whole number from 64 to 4096"),
        ("data=photos", "Write photos."),
        ("photos model.onnx", "Write --output DIR"),
        ("--output s3://bucket/out", "--output: cannot write to the URL 's3://bucket/out'"),
    ],
)
def test_a_wrong_argument_is_one_line_with_advice(capsys, words, advice):
    tool = ConfigToolParser("Train.", config_file=False, weights=True)
    add_training_arguments(tool)
    tool.add("--kind", "detector", choices=(*choices.DETECTORS, "voc"))
    tool.add("--size", "image size", type=vil.arguments.image_size)
    tool.add("--fraction", "share", type=vil.arguments.fraction)
    tool.add("data", "dataset", nargs="?", metavar="DATA")
    tool.add("--output", "report", type=output_file)
    with pytest.raises(SystemExit) as caught:
        tool.parse_args([*FILE, *words.split()])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and advice in err


# -- how a tool ends -------------------------------------------------------------------------------


def exit_status_and_line(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        run_tool(main)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return caught.value.code, err


def fail(rank: int, error: Exception) -> None:
    raise error


def train(function, *args) -> None:
    torch.multiprocessing.start_processes(function, args, nprocs=1, start_method="fork")


class Interrupted:
    """Python ignores exceptions in this destructor."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "main, status, name",
    [
        (lambda: fail(0, ConfigError("7.jpg is broken")), 1, "error: 7.jpg is broken\n"),
        (lambda: train(fail, ConfigError("7.jpg is broken")), 1, "error: 7.jpg is broken\n"),
        (lambda: open("/no_folder/file"), 1, "/no_folder/file"),
        (lambda: fail(0, ImportError("libGL.so.1: cannot open shared object file")), 1, "opencv-python-headless"),
        (lambda: fail(0, OSError(28, "No space left on device")), 1, "No space left"),
        (lambda: fail(0, MemoryError()), 1, "smaller images.\n"),
        (lambda: socket.socket(socket.AF_UNIX).bind(f"/tmp/{200 * 'a'}"), 1, "RAY_TMPDIR"),
        (lambda: create_backbone("vil_tiny", drop_path=0.1), 1, "drop_path"),
        (lambda: fail(0, KeyboardInterrupt()), 130, "interrupted"),
        (lambda: signal.raise_signal(signal.SIGTERM), 143, "SIGTERM"),
        (lambda: signal.raise_signal(signal.SIGHUP), 129, "SIGHUP"),
        (lambda: Interrupted() and time.sleep(60), 143, "SIGTERM"),
    ],
)
def test_errors_that_a_user_can_fix_are_one_line(capsys, monkeypatch, main, status, name):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    # The defaults, even if the tests were started by a program that ignores signals, such as nohup.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    code, line = exit_status_and_line(main, capsys)
    assert code == status and name in line
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_tool(lambda: signal.raise_signal(signal.SIGHUP))
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_bugs_have_a_traceback():
    for main, error in (
        (lambda: 1 / 0, ZeroDivisionError),
        (lambda: {}["key"], KeyError),
        (lambda: train(fail, KeyError("key")), torch.multiprocessing.ProcessRaisedException),
    ):
        with pytest.raises(error):
            run_tool(main)


@pytest.mark.parametrize(
    ("arguments", "message", "expected"),
    [
        ("--img-size 7", "img_size is 7: too small", "--img-size is 7: too small"),
        ("--img-size 7", "size: too small", None),
        ("--output output/preds", "output/model.onnx is an exported model", None),
        ("--device tpu", "MODEL.DEVICE is tpu. Use cpu.", "--device (MODEL.DEVICE) is tpu. Use cpu."),
        ("--weights=a", "The file 'a' (MODEL.WEIGHTS) is empty.", "The file 'a' (--weights, MODEL.WEIGHTS) is empty."),
        ("--device tpu", "MODEL.DEVICES is odd.", "MODEL.DEVICES is odd."),
        ("--val-fraction 1", "'val_fraction.json' and a/val_fraction are odd.", None),
        ("MODEL.DEVICE tpu", "MODEL.DEVICE is tpu.", None),
    ],
)
def test_an_error_names_the_flag_that_was_given(capsys, monkeypatch, arguments, message, expected):
    monkeypatch.setattr(sys, "argv", ["vil", *arguments.split()])
    line = exit_status_and_line(lambda: fail(0, ConfigError(message)), capsys)[1]
    assert line == f"error: {expected or message}\n"


def test_an_output_replaces_only_files_that_were_written_here(tmp_path):
    for name in ("model_final.pth", "config.yaml", "annotations.json", "photo.jpg", "report.html"):
        (tmp_path / name).write_text("vil-detectron2")
        with pytest.raises(argparse.ArgumentTypeError, match=f"{name}.* exists"):
            output_file(str(tmp_path / name))
    for content in ({"a": 1}, [{"b": 2}]):
        write_json(output_file(str(tmp_path / "own.json")), content)
        written = json.loads((tmp_path / "own.json").read_text())
        assert (written["rows"] if isinstance(content, list) else {"a": written["a"]}) == content


_STREAMS = """
import logging, sys
sys.path.insert(0, {root!r})
from backbones.errors import ConfigError
from vil.arguments import run_tool, show
def main():
    show("\\xfc a\\x1b[31m\\nb")
    logging.getLogger("projects_vil").warning("%s", "a\\x1b[31m\\nb")
    if len(sys.argv) > 1:
        raise ConfigError("a\\x1b[31m\\nb")
run_tool(main)
"""


@pytest.mark.parametrize(
    "redirected, status, errors",
    [
        ("", 0, []),
        ("a_mistake", 1, [r"error: a\x1b[31m\nb"]),
        (">&-", 0, []),
        ("2>&-", 0, None),
        (">/dev/full", 1, ["error: standard output: No space left on device"]),
        ("| true; exit $PIPESTATUS", 141, []),
        ("| true; exit $PIPESTATUS  # unbuffered", 141, None),
    ],
)
def test_closed_full_and_ascii_streams_and_control_characters(redirected, status, errors):
    command = ["bash", "-c", f'"$0" "$@" {redirected}', sys.executable, "-c", _STREAMS.format(root=str(ROOT))]
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
    env["PYTHONUNBUFFERED"] = "1" * ("unbuffered" in redirected)
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == status
    expected = [] if errors is None else [r"warning: a\x1b[31m\nb", *errors]
    assert result.stderr.splitlines() == expected
    assert result.stdout == ("" if redirected[:1] in (">", "|") else "\\xfc a\\x1b[31m\\nb\n")


def test_log_records_go_to_stderr_while_a_tool_runs(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)

    def main():
        print("fine")
        for name in ("projects_vil.config.device", "fvcore.common"):
            for level in (logging.DEBUG, logging.INFO, logging.WARNING):
                logging.getLogger(name).log(level, "%s %d", name, level)

    run_tool(main)
    lines = ["projects_vil.config.device 20", "warning: projects_vil.config.device 30", "warning: fvcore.common 30"]
    assert capsys.readouterr() == ("fine\n", "\n".join(lines) + "\n")
    run_tool(lambda: logging.getLogger("projects_vil").warning("unseen"), log=False)
    logging.getLogger("projects_vil").info("after the tool")
    assert capsys.readouterr() == ("", "")


def test_waiting_threads_spin_briefly_unless_the_environment_sets_it():
    for given, expected in (({}, "1000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")):
        with mock.patch.dict(os.environ, given, clear=True):
            run_tool(lambda: None)
            assert os.environ.get("GOMP_SPINCOUNT") == expected
