"""Configuration keys, and what a user reads after a mistake in a config or an override."""

import json

import pytest
from detectron2.config import get_cfg

from backbones import InputError
from projects_vil import add_vil_config, load_config
from tests.projects_vil.helpers import CONFIGS


def write(folder, text: str):
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def message(path, overrides=()) -> str:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_defaults():
    cfg = get_cfg()
    before = cfg.clone()
    add_vil_config(cfg)
    assert cfg.MODEL.TRANSFORMER == {
        "NAME": "vil_tiny_rpb",
        "OUT_FEATURES": [],
        "DROP_PATH": 0.1,
        "MAX_IMG_SIZE": 1333,
        "ACTIVATION_CHECKPOINTING": False,
        "ATTENTION_BACKEND": "auto",
        "ATTENTION": [],
        "ATTENTION_MODE": "",
        "GLOBAL_TOKENS": [],
        "WINDOW_SIZE": [],
        "RANK": [],
        "SHARED_PROJECTIONS": None,
        "MERGING": "",
        "BATCH_NORM": "",
        "POSITION_RESIZING": "",
        "FEATURE_REDRAW_PERIOD": 1000,
        "RANDOM_SHIFT_UNTIL": 0.0,
    }
    assert (cfg.SOLVER.OPTIMIZER, cfg.SOLVER.LR_MULTIPLIERS, cfg.DATASETS.COCO) == ("ADAMW", [], [])
    assert cfg.SOLVER.LAYER_DECAY == 1.0
    assert (cfg.SOLVER.POLY_LR_POWER, cfg.INPUT.CROP.SINGLE_CATEGORY_MAX_AREA, cfg.DATASETS.ADE20K) == (0.9, 1.0, [])
    assert cfg.INPUT.CROP.PAD is False and cfg.INPUT.PHOTOMETRIC_DISTORTION is False
    assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.CHECKPOINT_KEEP, cfg.TEST.BEST_METRIC) == (0, 0, "")
    assert cfg.OVERWRITE_OUTPUT_DIR is False and cfg.DATASETS.CHECK == "error"
    assert cfg.MODEL.EMA == {"ENABLED": False, "DECAY": 0.9998} and cfg.LOGGING == {"WANDB": "", "MLFLOW": ""}
    assert (cfg.SOLVER.AMP.DTYPE, cfg.SOLVER.ACCUMULATE, cfg.SOLVER.SCALE_LR_TO_BATCH) == ("float16", 1, 0)
    assert (cfg.SOLVER.SKIP_DIVERGED, cfg.SOLVER.EARLY_STOPPING_PATIENCE) == (0, 0)
    assert (cfg.TEST.LOSS, cfg.TEST.COCO_API, cfg.TEST.DRAW_IMAGES) == (False, "pycocotools", 4)
    del cfg.SOLVER["EPOCHS"], cfg.SOLVER["CHECKPOINT_KEEP"], cfg.TEST["BEST_METRIC"], cfg["OVERWRITE_OUTPUT_DIR"]
    del cfg.DATASETS["CHECK"], cfg.MODEL["EMA"], cfg["LOGGING"], cfg.SOLVER.AMP["DTYPE"], cfg.SOLVER["ACCUMULATE"]
    del cfg.SOLVER["SCALE_LR_TO_BATCH"], cfg.SOLVER["SKIP_DIVERGED"], cfg.SOLVER["EARLY_STOPPING_PATIENCE"]
    del cfg.TEST["LOSS"], cfg.TEST["COCO_API"], cfg.TEST["DRAW_IMAGES"]
    del cfg.MODEL["TRANSFORMER"], cfg.SOLVER["OPTIMIZER"], cfg.SOLVER["LR_MULTIPLIERS"], cfg.DATASETS["COCO"]
    del cfg.SOLVER["LAYER_DECAY"]
    assert (cfg.INPUT.AUGMENTATION, cfg.INPUT.COPY_PASTE) == ("default", {"PROBABILITY": 0.5})
    # configs/new_baselines of detectron2.
    assert cfg.INPUT.LSJ == {"SIZE": 1024, "SCALE": (0.1, 2.0)}
    del cfg.INPUT["AUGMENTATION"], cfg.INPUT["LSJ"], cfg.INPUT["COPY_PASTE"]
    del cfg.INPUT.CROP["PAD"], cfg.INPUT["PHOTOMETRIC_DISTORTION"]
    # Biases do not decay.
    assert (cfg.SOLVER.WEIGHT_DECAY_BIAS, before.SOLVER.WEIGHT_DECAY_BIAS) == (0.0, None)
    cfg.SOLVER.WEIGHT_DECAY_BIAS = None
    del cfg.SOLVER["POLY_LR_POWER"], cfg.INPUT.CROP["SINGLE_CATEGORY_MAX_AREA"], cfg.DATASETS["ADE20K"]
    assert cfg == before


def test_file_base_and_overrides_are_merged_and_frozen(tmp_path):
    write(tmp_path, "SOLVER:\n  MAX_ITER: 7\n  BASE_LR: 0.5\nMODEL:\n  TRANSFORMER:\n    NAME: vil_small\n")
    leaf = tmp_path / "leaf.yaml"
    leaf.write_text("_BASE_: config.yaml\nSOLVER:\n  BASE_LR: 0.25\n")
    cfg = load_config(leaf, ["MODEL.TRANSFORMER.DROP_PATH", "0.3", "SOLVER.STEPS", "(1, 2)"])
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR, cfg.SOLVER.STEPS) == (7, 0.25, (1, 2))
    assert (cfg.MODEL.TRANSFORMER.NAME, cfg.MODEL.TRANSFORMER.DROP_PATH) == ("vil_small", 0.3)
    with pytest.raises(AttributeError, match="frozen|immutable"):
        cfg.SOLVER.MAX_ITER = 8


@pytest.mark.parametrize("detector", CONFIGS)
def test_dumped_config_loads_again_equal(tmp_path, detector):
    overrides = ["DATASETS.COCO", "[['a', 'a.json', 'a']]", "SOLVER.LR_MULTIPLIERS", "[['*positions*', 0.5]]"]
    cfg = load_config(CONFIGS[detector], overrides)
    again = load_config(write(tmp_path, cfg.dump()))
    # As JSON, because tuples inside a tuple, of which detectron2's defaults have one, come back as lists.
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(cfg))
    assert type(again.DATASETS.TRAIN) is type(cfg.DATASETS.TRAIN)
    assert again.DATASETS.COCO == [["a", "a.json", "a"]]
    assert again.SOLVER.LR_MULTIPLIERS == [["*positions*", 0.5]]


@pytest.mark.parametrize(
    "key, closest",
    [
        ("MODEL.TRANSFORMER.NAMES", "MODEL.TRANSFORMER.NAME"),
        ("MODEL.TRANSFORMR", "MODEL.TRANSFORMER"),
        ("SOLVER.MAXITER", "SOLVER.MAX_ITER"),
        ("MODLE", "MODEL"),
    ],
)
def test_misspelled_key_names_the_closest(tmp_path, key, closest):
    expected = f"unknown config key {key}; did you mean '{closest}'?"
    nested = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(key.split(".")))
    path = write(tmp_path, nested.rstrip("\n") + " 3\n")
    assert message(path) == f"{path}: {expected}"
    assert message(CONFIGS["retinanet"], ["SOLVER.MAX_ITER", "3", key, "4"]).startswith(expected)


def test_wrong_type(tmp_path):
    path = write(tmp_path, "SOLVER:\n  MAX_ITER: many\n")
    for text in (message(path), message(CONFIGS["retinanet"], ["SOLVER.MAX_ITER", "many"])):
        assert "SOLVER.MAX_ITER is many, and it is a whole number, as " in text
    assert message(CONFIGS["retinanet"], ["SOLVER.BASE_LR", "-1"]).startswith(
        "SOLVER.BASE_LR is -1, and it is a number with a point, as 0.001; -1 with a point is -1.0"
    )
    # Without a default to show
    text = message(CONFIGS["retinanet"], ["TEST.BEST_METRIC", "5"])
    assert text.startswith("TEST.BEST_METRIC is 5, and it is a text (")
    assert 'several values in brackets, as (128,): write "(64,)"' in message(
        CONFIGS["retinanet"], ["INPUT.MIN_SIZE_TRAIN", "64"]
    )


def test_missing_file(tmp_path):
    assert message(tmp_path / "absent.yaml") == f"there is no config file {tmp_path / 'absent.yaml'}"
    assert message(tmp_path) == f"{tmp_path} is a folder, not a config file: name a file in it"


def test_missing_base_is_named(tmp_path):
    assert "absent.yaml" in message(write(tmp_path, "_BASE_: absent.yaml\n"))


def test_a_base_that_is_a_folder(tmp_path):
    path = write(tmp_path, "_BASE_: .\n")
    assert message(path) == f"{path}: cannot read {tmp_path}: Is a directory"


@pytest.mark.parametrize("text", ["MODEL: [", "MODEL:\n\tX: 1\n", "a: b: c\n"])
def test_not_yaml(tmp_path, text):
    path = write(tmp_path, text)
    assert message(path).startswith(f"{path} is not a YAML config: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "a sentence\n", "- a\n- b\n", "MODEL: 3\n"])
def test_yaml_that_is_no_mapping(tmp_path, text):
    path = write(tmp_path, text)
    assert str(path) in message(path)


@pytest.mark.parametrize("text", ["_BASE_: config.yaml\n", "_BASE_: 3\n"])
def test_impossible_base(tmp_path, text):
    path = write(tmp_path, text)
    assert str(path) in message(path)


def test_a_file_of_another_encoding(tmp_path):
    path = write(tmp_path, "")
    path.write_bytes(b"\xff\xfe\x00binary")
    assert "is not a YAML config" in message(path)


@pytest.mark.parametrize("base", [False, True])
def test_unsafe_tag_is_refused(tmp_path, base):
    trace = tmp_path / "executed"
    text = f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{trace}']\n"
    path = write(tmp_path, text)
    if base:
        path = tmp_path / "leaf.yaml"
        path.write_text("_BASE_: config.yaml\n")
    assert "could not determine a constructor" in message(path)
    assert not trace.exists()


def test_odd_overrides():
    text = message(CONFIGS["retinanet"], ["SOLVER.MAX_ITER", "3", "OUTPUT_DIR"])
    assert text == "overrides are keys and values by turns; 'OUTPUT_DIR' has no value"


def test_override_in_small_letters():
    assert "did you mean 'MODEL.DEVICE'?" in message(CONFIGS["retinanet"], ["model.device", "cpu"])


@pytest.mark.parametrize("key", ["DATASETS.TRAIN", "DATASETS.TEST"])
@pytest.mark.parametrize("value", ['("mine")', "mine"])
def test_a_dataset_without_its_comma(tmp_path, key, value):
    section, name = key.split(".")
    path = write(tmp_path, f"{section}:\n  {name}: {value}\n")
    for text in (message(path), message(CONFIGS["retinanet"], [key, value])):
        assert f"{key} is one name, mine: add a comma, {key} '(\"mine\",)'" in text
    assert load_config(CONFIGS["retinanet"], [key, '("mine",)']).DATASETS[name] == ("mine",)


def test_override_of_one_word():
    text = message(CONFIGS["retinanet"], ["OUTPUT_DIR", "x", "SOLVER.MAX_ITER=3"])
    assert text == "the override 'SOLVER.MAX_ITER=3' is one word; a key and its value are two: SOLVER.MAX_ITER 3"


@pytest.mark.parametrize("key", ["SOLVER.MAX_ITER.X", "MODEL.TRANSFORMER.NAME.X", "--resume", ""])
def test_override_of_no_key(key):
    assert key in message(CONFIGS["retinanet"], [key, "3"])


def test_override_of_a_whole_section_is_short():
    assert "MODEL" in message(CONFIGS["retinanet"], ["MODEL", "3"])
