"""One way to override: pairs with and without a word before them, and arguments in any place."""

import argparse
import itertools

import pytest
import torch

from backbones import InputError
from projects_vil.config import ConfigToolParser, config_of
from projects_vil.engine import training_parser
from tests.projects_vil.helpers import CONFIGS

FILE = ["--config-file", str(CONFIGS["retinanet"])]
PAIRS = ["SOLVER.BASE_LR", "-1e-3", "SOLVER.STEPS", "(3, 5)"]


def parser(**options) -> ConfigToolParser:
    """Of a tool with a flag, and lists of files and sizes."""
    tool = ConfigToolParser("Do a thing.", weights=True, **options)
    tool.add_argument("--flag", action="store_true")
    tool.add_argument("--images", nargs="+", default=[])
    tool.add_argument("--rest", nargs="*")
    tool.add_argument("--size", nargs=2, type=int)
    return tool


def train_parser() -> ConfigToolParser:
    return training_parser("Train.")


@pytest.mark.parametrize("order", list(itertools.permutations([FILE, PAIRS, ["--flag", "--size", "4", "5"]])))
@pytest.mark.parametrize("word", [[], ["--opts"]])
def test_pairs_stand_anywhere_bare_or_after_the_word(order, word):
    tokens = [token for part in order for token in ([*word, *part] if part is PAIRS else part)]
    args = parser().parse_args(tokens)
    assert args.opts == PAIRS and args.config_file == FILE[1] and args.flag and args.size == [4, 5]


@pytest.mark.parametrize("word", [[], ["--opts"]])
@pytest.mark.parametrize("where", range(3))
def test_training_takes_detectron2s_arguments_anywhere(word, where):
    parts = [[*word, *PAIRS], [*FILE, "--num-gpus", "2"]]
    parts.insert(where, ["--resume"])
    args = train_parser().parse_args([token for part in parts for token in part])
    assert (args.opts, args.resume, args.num_gpus, args.config_file) == (PAIRS, True, 2, FILE[1])
    assert args.eval_only is False and args.machine_rank == 0


def test_no_pairs():
    assert parser().parse_args(FILE).opts == [] == train_parser().parse_args(FILE).opts


def test_pairs_in_both_ways_add_up():
    args = parser().parse_args([*FILE, "SEED", "1", "--opts", "SEED", "2", "--flag", "VIS_PERIOD", "3"])
    assert args.opts == ["SEED", "1", "SEED", "2", "VIS_PERIOD", "3"]


@pytest.mark.parametrize("name", ["images", "rest"])
def test_a_list_of_files_ends_where_a_key_begins(name):
    files = ["a.jpg", "DSC_01.JPG", "b.png"]
    args = parser().parse_args([*FILE, f"--{name}", *files, *PAIRS, "--flag"])
    assert (getattr(args, name), args.opts, args.flag) == (files, PAIRS, True)


def test_a_file_that_is_named_like_a_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEST.JPG").write_text("")
    args = parser().parse_args([*FILE, "--images", "a.jpg", "TEST.JPG", "SEED", "1"])
    assert (args.images, args.opts) == (["a.jpg", "TEST.JPG"], ["SEED", "1"])


def test_beginnings_of_arguments_still_do():
    args = parser().parse_args(["--config", FILE[1], *PAIRS, "--fl", "--ima=a.jpg"])
    assert args.flag and args.images == ["a.jpg"] and args.opts == PAIRS


@pytest.mark.parametrize("make", [parser, train_parser])
def test_an_override_without_a_value(make):
    with pytest.raises(InputError, match="the override SEED has no value: --config-file follows it"):
        make().parse_args(["SEED", *FILE])


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([*FILE, "--flagg"], "unknown argument --flagg; did you mean '--flag'?"),
        ([*FILE, "--size", "4"], "argument --size: expected 2 arguments"),
        ([*FILE, "--images", "--flag"], "argument --images: expected at least one argument"),
        (["--flag"], "the following arguments are required: --config-file"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys, tokens, message):
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(tokens)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert err.endswith("--help lists all arguments)\n")


def test_help_has_the_description_and_the_overrides(capsys):
    for make in (parser, train_parser):
        with pytest.raises(SystemExit) as caught:
            make().parse_args(["--help"])
        out = capsys.readouterr().out
        assert caught.value.code == 0 and "KEY VALUE" in out and "LazyConfig" not in out


# -- short forms -----------------------------------------------------------------------------------


def test_short_forms_are_their_keys():
    args = parser().parse_args([*FILE, "--weights", "a.pth", "--device", "cpu", "SEED", "1"])
    assert args.opts == ["SEED", "1", "MODEL.WEIGHTS", "a.pth", "MODEL.DEVICE", "cpu"]
    cfg = config_of(args)
    assert (cfg.MODEL.WEIGHTS, cfg.MODEL.DEVICE, cfg.SEED) == ("a.pth", "cpu", 1)


@pytest.mark.parametrize("name, key", [("weights", "MODEL.WEIGHTS"), ("device", "MODEL.DEVICE")])
def test_a_short_form_and_its_key(name, key):
    assert parser().parse_args([*FILE, f"--{name}", "cpu", key, "cpu"]).opts == [key, "cpu", key, "cpu"]
    with pytest.raises(InputError, match=f"--{name} cpu and {key} other are one thing, said twice"):
        parser().parse_args([*FILE, key, "other", f"--{name}", "cpu"])


# -- the device ------------------------------------------------------------------------------------


def device_of(*tokens: str, **options) -> str:
    return config_of(parser(**options).parse_args([*FILE, *tokens])).MODEL.DEVICE


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def cuda_config(tmp_path):
    """A file that says what detectron2's default is too."""
    path = tmp_path / "cuda.yaml"
    path.write_text(f"_BASE_: {CONFIGS['retinanet']}\nMODEL:\n  DEVICE: cuda\n")
    return ["--config-file", str(path)]


def test_the_gpu_where_there_is_one(gpu, cuda_config, caplog):
    with caplog.at_level("INFO"):
        assert device_of(*cuda_config) == "cuda"
    assert [record.getMessage() for record in caplog.records] == ["on cuda: the GPU cuda"]


def test_the_cpu_where_there_is_no_gpu(no_gpu, cuda_config, caplog):
    with caplog.at_level("INFO"):
        assert device_of(*cuda_config) == "cpu"
    assert [record.getMessage() for record in caplog.records] == ["on the CPU: there is no CUDA device here"]


def test_a_config_for_the_cpu_is_left_there(gpu, caplog):
    with caplog.at_level("INFO"):
        assert device_of() == "cpu"
    (record,) = caplog.records
    assert record.getMessage() == "on the CPU, as the config says: MODEL.DEVICE cuda takes the GPU"


@pytest.mark.parametrize("form", ["--device", "MODEL.DEVICE"])
def test_a_device_that_is_asked_for(gpu, form):
    assert [device_of(form, device) for device in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]
    with pytest.raises(InputError, match=f"{form} is cuda:2, and there are 2 CUDA devices here"):
        device_of(form, "cuda:2")
    with pytest.raises(InputError, match=f"{form} is 'tpu': it is cpu or cuda"):
        device_of(form, "tpu")


def test_a_gpu_that_is_asked_for_and_is_not_here(no_gpu):
    """The advice can be typed as it is printed, at the end of the same command."""
    with pytest.raises(InputError, match="there is no CUDA device here: use --device cpu"):
        device_of("--device", "cuda")
    with pytest.raises(InputError, match="there is no CUDA device here: add MODEL.DEVICE cpu"):
        device_of("MODEL.DEVICE", "cuda")
    assert device_of("MODEL.DEVICE", "cuda", "MODEL.DEVICE", "cpu") == "cpu"


@pytest.mark.parametrize("form", ["--device", "MODEL.DEVICE"])
def test_a_tool_for_the_cpu_alone(gpu, cuda_config, form, caplog):
    with caplog.at_level("INFO"):
        assert device_of(*cuda_config, devices=["cpu"]) == "cpu" == device_of(form, "cpu", devices=["cpu"])
    assert not caplog.records
    with pytest.raises(InputError, match=f"{form} is cuda: this tool works on the CPU alone"):
        device_of(form, "cuda", devices=["cpu"])


def test_a_tool_that_runs_no_model_has_no_device():
    assert "--device" not in parser(devices=[]).format_help()
    assert isinstance(parser(devices=[]).parse_args(FILE), argparse.Namespace)
