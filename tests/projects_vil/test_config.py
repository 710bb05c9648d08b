"""Config keys, files, overrides, devices, and the task of a config."""

import json
import socket
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode, get_cfg

from backbones import ConfigError
from projects_vil import config, load_config
from projects_vil.engine import check_values
from tests.projects_vil.helpers import CONFIGS, ROOT, message, small_config
from tests.selection import slow_except

ZOO = Path(str(files("detectron2.model_zoo") / "configs"))


def write(folder, text: str):
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def error_of(path, overrides=()) -> str:
    return message(load_config, path, overrides)


# -- names -----------------------------------------------------------------------------------------


def test_configs_are_found_by_name():
    root = ROOT / "configs"
    for path in root.rglob("*.yaml"):
        name = path.relative_to(root).as_posix()
        assert config.config_path(name).samefile(path) and config.config_path(name.removesuffix(".yaml")).samefile(path)
    assert load_config(name) == load_config(path)


@pytest.mark.parametrize("name", ["retinanet/lit_ti1x", "retinanet/lit_ti_1", "../README", "retinanet"])
def test_an_unknown_config_names_the_closest(name):
    with pytest.raises(ConfigError, match="no config") as caught:
        config.config_path(name)
    assert ("'retinanet/lit_ti_1x'" in str(caught.value)) == ("lit_ti" in name)


# -- keys ------------------------------------------------------------------------------------------


def assert_part_of(theirs: CfgNode, ours: CfgNode, prefix: str = "") -> None:
    """Check that every key of ``theirs`` has the same value in ``ours``."""
    for key, value in theirs.items():
        if isinstance(value, CfgNode):
            assert_part_of(value, ours[key], f"{prefix}{key}.")
        else:
            assert (ours[key], type(ours[key])) == (value, type(value)), f"{prefix}{key}"


@pytest.mark.parametrize("step", slow_except([1, 6], [6]))
def test_a_config_of_the_model_zoo_keeps_its_meaning(step):
    """detectron2 evaluates some values as Python code. ``load_config`` parses these values without running code."""
    paths, evaluated = sorted(ZOO.rglob("*.yaml")), 0
    for path in paths[step // 2 :: step]:
        theirs, ours = get_cfg(), load_config(path)
        theirs.merge_from_file(str(path))
        assert_part_of(theirs, ours)
        assert (ours.SOLVER.OPTIMIZER, ours.SOLVER.WEIGHT_DECAY_BIAS) == ("SGD", theirs.SOLVER.WEIGHT_DECAY_BIAS)
        evaluated += ours.MODEL.ANCHOR_GENERATOR.SIZES[0][1:] == [32 * 2 ** (1 / 3), 32 * 2 ** (2 / 3)]
    assert len(paths) > 50 and evaluated > 5 // step


def test_pointrends_color_augmentation(tmp_path):
    path = write(tmp_path, "INPUT:\n  COLOR_AUG_SSD: True\n")
    cfg = load_config(path)
    assert cfg.INPUT.PHOTOMETRIC_DISTORTION and not config.default_config().INPUT.PHOTOMETRIC_DISTORTION
    assert not load_config(path, ["INPUT.PHOTOMETRIC_DISTORTION", "False"]).INPUT.PHOTOMETRIC_DISTORTION
    assert load_config(write(tmp_path, cfg.dump())).INPUT == cfg.INPUT
    assert load_config(CONFIGS["retinanet"], ["INPUT.COLOR_AUG_SSD", "True"]).INPUT.PHOTOMETRIC_DISTORTION


# -- files and overrides ---------------------------------------------------------------------------


def test_file_base_and_overrides_are_merged_and_frozen(tmp_path):
    write(tmp_path, "SOLVER:\n  MAX_ITER: 7\n  BASE_LR: 0.5\nMODEL:\n  TRANSFORMER:\n    VARIANT: vil_small\n")
    leaf = tmp_path / "leaf.yaml"
    leaf.write_text("_BASE_: config.yaml\nSOLVER:\n  BASE_LR: 1\n")
    cfg = load_config(leaf, ["MODEL.TRANSFORMER.DROP_PATH", "0.3", "SOLVER.STEPS", "(1, 2)", "SOLVER.GAMMA", "1"])
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR, cfg.SOLVER.STEPS) == (7, 1, (1, 2))
    assert (cfg.SOLVER.GAMMA, type(cfg.SOLVER.GAMMA)) == (1.0, float)
    assert (cfg.MODEL.TRANSFORMER.VARIANT, cfg.MODEL.TRANSFORMER.DROP_PATH) == ("vil_small", 0.3)
    assert cfg.is_frozen()


def test_numbers_as_names_merge_keys_and_the_home_folder(tmp_path, monkeypatch):
    transformer = "  TRANSFORMER: &a\n    <<: {DROP_PATH: 0.2}\n    DROP_PATH: 0.3\n"
    cfg = load_config(write(tmp_path, f"OUTPUT_DIR: '2024'\nMODEL:\n  WEIGHTS: '12'\n{transformer}"))
    assert (cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS, cfg.MODEL.TRANSFORMER.DROP_PATH) == ("2024", "12", 0.3)
    assert load_config(write(tmp_path, cfg.dump())).OUTPUT_DIR == "2024"
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = load_config(write(tmp_path, "OUTPUT_DIR: ~/run\n"), ["MODEL.WEIGHTS", "~/a~b.pth"])
    assert (cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS) == (f"{tmp_path}/run", f"{tmp_path}/a~b.pth")


def test_a_dumped_config_loads_again_equal(tmp_path):
    overrides = ["DATASETS.COCO", "[['a', 'a.json', 'a']]", "SOLVER.LR_MULTIPLIERS", "[['*positions*', 0.5]]"]
    cfg = load_config(CONFIGS["mask_rcnn"], overrides)
    again = load_config(write(tmp_path, cfg.dump()))
    # As JSON, because a tuple inside a tuple is loaded as a list. detectron2's defaults have one.
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(cfg))
    assert type(again.DATASETS.TRAIN) is type(cfg.DATASETS.TRAIN)


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("MODEL.TRANSFORMER.VARIANTS", "3", "'MODEL.TRANSFORMER.VARIANT'"),
        ("MODLE", "3", "'MODEL'"),
        ("SOLVER.MAX_ITER", "many", "many"),
        ("SEED", "2024-01-01", "SEED is"),
        ("MODEL", "3", "MODEL"),
        ("INPUT.MIN_SIZE_TRAIN", "640", 'Write "(640,)"'),
        ("DATASETS.TRAIN", "photos", """Write "('photos',)\""""),
        ("SOLVER.BASE_LR", "{}", "SOLVER.BASE_LR is {}"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, key, value, named):
    nested = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(key.split(".")))
    path = write(tmp_path, nested.rstrip("\n") + f" {value}\n")
    assert str(path) in error_of(path)
    assert named in error_of(CONFIGS["retinanet"], {"SOLVER.MAX_ITER": "3", key: value})


@pytest.mark.parametrize("overrides", [["OUTPUT_DIR"], ["SOLVER.MAX_ITER=3"], ["--resume", "3"]])
def test_unusual_overrides(overrides):
    assert overrides[0] in error_of(CONFIGS["retinanet"], overrides)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"a sentence\n", b"- a\n- b\n", b"MODEL: [", b"_BASE_: config.yaml\n", b"\xff\xfe\x00binary"),
        *(b"MODEL: 5", b"SOLVER: {MAX_ITER: {A: 1}}", b"SOLVER: {MAX_ITER: 5, MAX_ITER: 7}", b"VERSION: 1"),
        *(b"SOLVER.MAX_ITER: 5", b"_BASE_: /dev/zero", b"SOLVER: &a {X: *a}", b"_BASE_: http://127.0.0.1:9/base.yaml"),
    ],
)
def test_a_file_that_is_not_a_config_is_named(tmp_path, content, monkeypatch):
    """No base is downloaded."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    for wrong in (path, tmp_path, tmp_path / "absent.yaml"):
        assert str(wrong) in error_of(wrong)


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir ['{}']",
        "!!python/object/apply:eval [\"__import__('os').mkdir('{}')\"]",
        "!!python/object/apply:eval [\"'a'.upper()\"]",
    ],
)
def test_a_config_runs_no_code(tmp_path, base, value):
    trace = tmp_path / "executed"
    path = write(tmp_path, f"OUTPUT_DIR: {value.format(trace)}\n")
    if base:
        path = tmp_path / "leaf.yaml"
        path.write_text("_BASE_: config.yaml\n")
    assert str(path) in error_of(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "other, value, key, instead",
    [
        ("INPUT.AUGMENTATION", "lsj", "INPUT.MIN_SIZE_TRAIN", "default"),
        ("INPUT.AUGMENTATION", "lsj_copy_paste", "INPUT.PHOTOMETRIC_DISTORTION", "default or lsj"),
        ("INPUT.AUGMENTATION", "default", "INPUT.LSJ.SIZE", "lsj or lsj_copy_paste"),
        ("MODEL.EMA.ENABLED", "False", "MODEL.EMA.DECAY", "True"),
    ],
)
def test_an_override_without_effect(other, value, key, instead):
    cfg = small_config("mask_rcnn", other, value)
    with pytest.raises(ConfigError, match=f"{key} .*{other} {instead}"):
        check_values(cfg, [other, key])
    check_values(cfg, [other, "SOLVER.MAX_ITER"])


# -- devices ---------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 2], ids=["no GPU", "two GPUs"])
def gpus(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    return request.param


def test_a_config_of_a_gpu_runs_on_what_is_available(gpus, caplog):
    cfg = small_config("retinanet", "MODEL.DEVICE", "cuda")
    with caplog.at_level("INFO"):
        assert config.choose_device(cfg).MODEL.DEVICE == ("cuda" if gpus else "cpu")
        assert config.choose_device(small_config("retinanet", "MODEL.DEVICE", "cpu")).MODEL.DEVICE == "cpu"
        assert len(caplog.messages) == 2
        assert config.choose_device(cfg, devices=("cpu",)).MODEL.DEVICE == "cpu"
    assert len(caplog.messages) == 2 and cfg.MODEL.DEVICE == "cuda"


def test_a_requested_device_is_used_or_refused(gpus):
    for device, number in (("cpu", 0), ("cuda", 1), ("cuda:1", 2), ("cuda:2", 3), ("tpu", 9)):
        cfg = small_config("retinanet", "MODEL.DEVICE", device)
        if gpus >= number:
            assert config.choose_device(cfg, requested=True).MODEL.DEVICE == device
        else:
            assert f"MODEL.DEVICE is {device}" in message(config.choose_device, cfg, requested=True)
    with pytest.raises(ConfigError, match="MODEL.DEVICE is cuda"):
        config.choose_device(small_config("retinanet", "MODEL.DEVICE", "cuda"), devices=("cpu",), requested=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is available")
def test_attention_for_a_gpu():
    keys = ["MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton"]
    found = config.choose_device(small_config("retinanet", *keys, "MODEL.DEVICE", "cuda"))
    assert (found.MODEL.DEVICE, found.MODEL.TRANSFORMER.ATTENTION_BACKEND) == ("cpu", "auto")
    assert "ATTENTION_BACKEND" in message(config.choose_device, small_config("retinanet", *keys, "MODEL.DEVICE", "cpu"))


@pytest.mark.parametrize(
    "device, precision, tf32",
    [("cuda", "high", True), ("cuda", "highest", False), ("cuda", "", None), ("cpu", "high", None)],
)
def test_precision_of_float32_products(device, precision, tf32):
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    try:
        config.set_precision(small_config("retinanet", "MODEL.DEVICE", device, "FLOAT32_PRECISION", precision))
        assert [backend.allow_tf32 for backend in backends] == (before if tf32 is None else [tf32] * 2)
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


# -- the task of a config --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "detector, overrides, name, head",
    [
        ("retinanet", ["MODEL.MASK_ON", "True"], "RetinaNet", "RETINANET"),
        ("mask_rcnn", [], "Mask R-CNN", "ROI_HEADS"),
        ("mask_rcnn", ["MODEL.MASK_ON", "False"], "Faster R-CNN", "ROI_HEADS"),
        ("cascade_mask_rcnn", [], "Cascade Mask R-CNN", "ROI_HEADS"),
        ("mask_rcnn", ["MODEL.ROI_MASK_HEAD.NAME", "PointRendMaskHead"], "PointRend", "ROI_HEADS"),
        ("semantic_fpn", [], "SemanticSegmentor", "SEM_SEG_HEAD"),
    ],
)
def test_name_and_head_of_a_detector(detector, overrides, name, head):
    cfg = small_config(detector, *overrides)
    assert (config.detector_name(cfg), config.head_of(cfg)) == (name, head)
