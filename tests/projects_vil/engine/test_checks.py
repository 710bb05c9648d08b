"""What is found wrong with a run before it starts."""

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultTrainer

from backbones import InputError
from projects_vil.config import device
from projects_vil.data import register_datasets
from projects_vil.engine import check_setup
from tests.projects_vil.helpers import lively_detector, small_config


def setup_message(*overrides: str, **options) -> str:
    with pytest.raises(InputError) as caught:
        check_setup(small_config("retinanet", *overrides), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_setup_that_is_right(shapes, trained_run):
    final = str(trained_run / "model_final.pth")
    check_setup(small_config())
    check_setup(small_config("retinanet", "MODEL.WEIGHTS", final), eval_only=True)
    absent = ["MODEL.WEIGHTS", final, "DATASETS.TRAIN", "('absent',)"]
    check_setup(small_config("retinanet", *absent), eval_only=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused without a CUDA device")
def test_no_cuda_device():
    assert "MODEL.DEVICE is cuda" in setup_message("MODEL.DEVICE", "cuda")
    assert "there is no CUDA device" in setup_message("MODEL.DEVICE", "cuda:1", "SOLVER.AMP.ENABLED", "True")


def test_amp_on_the_cpu(shapes):
    assert setup_message("SOLVER.AMP.ENABLED", "True").startswith("SOLVER.AMP.ENABLED is True")
    check_setup(small_config("retinanet", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "bfloat16"))


def test_a_last_rate_above_the_first(shapes):
    poly = ["SOLVER.LR_SCHEDULER_NAME", "WarmupPolyLR", "SOLVER.BASE_LR", "1e-5", "SOLVER.BASE_LR_END", "1e-6"]
    check_setup(small_config("retinanet", *poly))
    lower = [*poly, "SOLVER.BASE_LR", "1e-7"]
    assert setup_message(*lower) == "SOLVER.BASE_LR_END is 1e-06: it is 0 to SOLVER.BASE_LR, 1e-07"
    scaled = [*poly, "SOLVER.REFERENCE_WORLD_SIZE", "16", "SOLVER.IMS_PER_BATCH", "16"]
    assert "it is 0 to SOLVER.BASE_LR, 6.25e-07" in setup_message(*scaled)
    check_setup(small_config("retinanet", *scaled), processes=16)
    assert "POLY_LR_POWER is 0.0: it is above 0" in setup_message(*poly, "SOLVER.POLY_LR_POWER", "0.0")


def test_another_device():
    assert setup_message("MODEL.DEVICE", "tpu") == "MODEL.DEVICE is 'tpu': it is cpu or cuda"


def test_batch_is_shared_out_evenly(shapes):
    overrides = ["SOLVER.IMS_PER_BATCH", "6"]
    assert setup_message(*overrides, processes=4) == "SOLVER.IMS_PER_BATCH is 6, no multiple of 4 processes"
    check_setup(small_config("retinanet", *overrides), processes=3)


def test_a_batch_is_split_evenly(shapes):
    overrides = ["SOLVER.IMS_PER_BATCH", "8", "SOLVER.ACCUMULATE", "4"]
    check_setup(small_config("retinanet", *overrides), processes=2)
    text = "SOLVER.ACCUMULATE is 4, and the 2 images of a process cannot be split evenly"
    assert setup_message(*overrides, processes=4) == text


def test_one_key_scales_the_rate():
    text = setup_message("SOLVER.SCALE_LR_TO_BATCH", "16", "SOLVER.REFERENCE_WORLD_SIZE", "8")
    assert text.startswith("SOLVER.SCALE_LR_TO_BATCH and SOLVER.REFERENCE_WORLD_SIZE both scale the learning rate")


@pytest.mark.parametrize("processes", [3, 5, 6, 12, 32, 64])
def test_batch_is_scaled_with_the_processes(shapes, processes):
    overrides = ["SOLVER.IMS_PER_BATCH", "16", "SOLVER.REFERENCE_WORLD_SIZE", "8"]
    check_setup(small_config("retinanet", *overrides), processes=processes)
    scaled = DefaultTrainer.auto_scale_workers(small_config("retinanet", *overrides), processes)
    assert scaled.SOLVER.IMS_PER_BATCH == 2 * processes


def test_batch_of_the_reference_is_shared_out_evenly(shapes):
    text = setup_message("SOLVER.IMS_PER_BATCH", "6", "SOLVER.REFERENCE_WORLD_SIZE", "4", processes=3)
    assert text == "SOLVER.IMS_PER_BATCH is 6, no multiple of the 4 processes of SOLVER.REFERENCE_WORLD_SIZE"


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("INPUT.RANDOM_FLIP", "diagonal", "unknown INPUT.RANDOM_FLIP 'diagonal': it is one of none"),
        ("SOLVER.WARMUP_METHOD", "cubic", "unknown SOLVER.WARMUP_METHOD 'cubic': it is one of linear, constant"),
        ("SOLVER.OPTIMIZER", "ADAM", "unknown SOLVER.OPTIMIZER 'ADAM': it is one of ADAMW, SGD"),
        ("SOLVER.LR_SCHEDULER_NAME", "Cosine", "unknown SOLVER.LR_SCHEDULER_NAME 'Cosine'"),
        ("SOLVER.BASE_LR_END", "-1.0", "SOLVER.BASE_LR_END is -1.0: it is 0 or more"),
        ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "-1.0", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE is -1.0: it is above 0"),
        ("SOLVER.STEPS", "(10, 5)", "SOLVER.STEPS is (10, 5): it is iterations, each later than the one before"),
        ("SOLVER.MOMENTUM", "2.0", "SOLVER.MOMENTUM is 2.0: it is 0 or more, and below 1"),
        ("INPUT.MIN_SIZE_TRAIN", "(0,)", "INPUT.MIN_SIZE_TRAIN is (0,): it is sides of 1 pixel or more"),
        ("TEST.DETECTIONS_PER_IMAGE", "0", "TEST.DETECTIONS_PER_IMAGE is 0: it is 1 or more"),
        ("TEST.BEST_METRIC", "bbox/ap", "TEST.BEST_METRIC is bbox/ap: it is one of bbox, validation_loss, and"),
        (
            "TEST.BEST_METRIC",
            "validation_loss",
            "TEST.BEST_METRIC is validation_loss: it is one of bbox, validation_loss",
        ),
        ("TEST.BEST_METRIC", "segm/AP", "TEST.BEST_METRIC is segm/AP: it is one of bbox, validation_loss, and"),
        ("SOLVER.STEPS", "('a', 5)", "SOLVER.STEPS is ('a', 5): it is iterations"),
        ("SOLVER.WARMUP_FACTOR", "-1.0", "SOLVER.WARMUP_FACTOR is -1.0: it is 0 to 1"),
        ("SOLVER.NUM_DECAYS", "0", "SOLVER.NUM_DECAYS is 0: it is 1 or more"),
        ("SEED", "99999999999999999999", "SEED is 99999999999999999999: it is 0 or more"),
        ("MODEL.RETINANET.NUM_CLASSES", "-1", "MODEL.RETINANET.NUM_CLASSES is -1: it is 1 or more"),
        ("MODEL.FPN.OUT_CHANNELS", "-4", "MODEL.FPN.OUT_CHANNELS is -4: it is 1 or more"),
        ("MODEL.ANCHOR_GENERATOR.SIZES", "[[0]]", "MODEL.ANCHOR_GENERATOR.SIZES is [[0]]: it is lists of sides"),
        ("INPUT.MASK_FORMAT", "foo", "unknown INPUT.MASK_FORMAT 'foo': it is one of polygon, bitmask"),
        ("INPUT.MIN_SIZE_TRAIN_SAMPLING", "foo", "unknown INPUT.MIN_SIZE_TRAIN_SAMPLING 'foo'"),
        ("INPUT.FORMAT", "HSV", "unknown INPUT.FORMAT 'HSV': it is one of RGB, BGR"),
        ("INPUT.MAX_SIZE_TRAIN", "0", "INPUT.MAX_SIZE_TRAIN is 0: it is a side"),
        ("INPUT.MIN_SIZE_TEST", "-1", "INPUT.MIN_SIZE_TEST is -1: it is a side"),
        ("TEST.BEST_METRIC", "validation_loss/total_loss", "TEST.BEST_METRIC is validation_loss/total_loss, which"),
        ("SOLVER.MAX_ITER", "None", "SOLVER.MAX_ITER is None: it is 1 or more iterations"),
        ("SOLVER.MAX_ITER", "0", "SOLVER.MAX_ITER is 0: it is 1 or more"),
        ("SOLVER.MAX_ITER", "-5", "SOLVER.MAX_ITER is -5: it is 1 or more"),
        ("SOLVER.IMS_PER_BATCH", "0", "SOLVER.IMS_PER_BATCH is 0: it is 1 or more images"),
        ("SOLVER.IMS_PER_BATCH", "-2", "SOLVER.IMS_PER_BATCH is -2: it is 1 or more images"),
        ("SOLVER.REFERENCE_WORLD_SIZE", "-8", "SOLVER.REFERENCE_WORLD_SIZE is -8: it is a number of processes, or 0"),
        ("SOLVER.CHECKPOINT_PERIOD", "0", "SOLVER.CHECKPOINT_PERIOD is 0: it is 1 or more iterations"),
        ("SOLVER.ACCUMULATE", "0", "SOLVER.ACCUMULATE is 0: it is 1 or more parts of a batch"),
        ("SOLVER.SCALE_LR_TO_BATCH", "-1", "SOLVER.SCALE_LR_TO_BATCH is -1: it is a number of images, or 0"),
        ("SOLVER.SKIP_DIVERGED", "-1", "SOLVER.SKIP_DIVERGED is -1: it is a number of batches, or 0"),
        ("SOLVER.EARLY_STOPPING_PATIENCE", "-1", "SOLVER.EARLY_STOPPING_PATIENCE is -1: it is a number of"),
        ("SOLVER.EARLY_STOPPING_PATIENCE", "3", "SOLVER.EARLY_STOPPING_PATIENCE is 3: it needs TEST.BEST_METRIC"),
        ("SOLVER.AMP.DTYPE", "float", "unknown SOLVER.AMP.DTYPE 'float'"),
        ("MODEL.EMA.DECAY", "1.0", "MODEL.EMA.DECAY is 1.0: it is 0 or more, and below 1"),
        ("SOLVER.WARMUP_ITERS", "-1", "SOLVER.WARMUP_ITERS is -1: it is 0 or more iterations"),
        ("SOLVER.BASE_LR", "-0.1", "SOLVER.BASE_LR is -0.1: it is above 0"),
        ("SOLVER.BASE_LR", "float('nan')", "SOLVER.BASE_LR is float('nan'), and it is a number with a point"),
        ("SOLVER.WEIGHT_DECAY", "-1.0", "SOLVER.WEIGHT_DECAY is -1.0: it is 0 or more"),
        ("TEST.EVAL_PERIOD", "-1", "TEST.EVAL_PERIOD is -1: it is a number of iterations, or 0 for the end alone"),
        ("DATALOADER.NUM_WORKERS", "-1", "DATALOADER.NUM_WORKERS is -1: it is 0 or more processes"),
        ("DATALOADER.SAMPLER_TRAIN", "TrainSampler", "unknown DATALOADER.SAMPLER_TRAIN 'TrainSampler'"),
        ("MODEL.PIXEL_STD", "[1.0, 1.0]", "MODEL.PIXEL_STD is [1.0, 1.0]: it is three numbers above 0"),
        ("MODEL.PIXEL_STD", "[1.0, 0.0, 1.0]", "MODEL.PIXEL_STD is [1.0, 0.0, 1.0]: it is three numbers above 0"),
        ("MODEL.PIXEL_MEAN", "[1.0]", "MODEL.PIXEL_MEAN is [1.0]: it is three numbers"),
        ("OUTPUT_DIR", "", "OUTPUT_DIR is '': it is the folder"),
        (
            "MODEL.TRANSFORMER.ATTENTION_BACKEND",
            "triton",
            "MODEL.TRANSFORMER.ATTENTION_BACKEND is triton, which needs a CUDA device, not 'cpu'",
        ),
    ],
)
def test_values_that_cannot_be(key, value, message):
    assert setup_message(key, value).startswith(message)


def test_a_backend_is_checked_on_the_device_of_the_run(shapes, monkeypatch):
    """And not where models are built to be checked."""
    monkeypatch.setattr(device, "missing_for", lambda found: None if found.type == "cpu" else "another device")
    check_setup(small_config("retinanet", "MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton"))


def test_an_unknown_kind_of_crop():
    text = setup_message("INPUT.CROP.ENABLED", "True", "INPUT.CROP.TYPE", "relativ")
    assert text.startswith("unknown INPUT.CROP.TYPE 'relativ'") and text.endswith("did you mean 'relative'?")


def test_a_detectors_crops_are_not_padded():
    text = setup_message("INPUT.CROP.PAD", "True")
    assert text == "INPUT.CROP.PAD is True, and a RetinaNet's crops are not padded: set it to False"


@pytest.mark.parametrize("eval_only", [False, True])
def test_number_of_classes_is_checked_first(own, eval_only):
    """Before detectron2 has read the file, wherever its categories stand."""
    name, annotations, images = own
    datasets = ["DATASETS.COCO", repr([[name, annotations, images]]), "DATASETS.TEST", f"('{name}',)"]
    cfg = small_config("retinanet", *datasets, "DATASETS.TRAIN", f"('{name}',)", "MODEL.RETINANET.NUM_CLASSES", "80")
    register_datasets(cfg)
    key = "MODEL.RETINANET.NUM_CLASSES"
    with pytest.raises(InputError, match=f"{key} is 80, and {name} has 3 classes: add {key} 3"):
        check_setup(cfg, eval_only=eval_only)


@pytest.fixture
def own(shapes):
    name = "checks_test"
    yield [name, str(shapes / "annotations/instances_val.json"), str(shapes / "val")]
    DatasetCatalog.remove(name)
    MetadataCatalog.remove(name)


def test_something_to_train_and_to_evaluate_on(shapes):
    neither = ["DATASETS.TRAIN", "()", "DATASETS.TEST", "()", "MODEL.WEIGHTS", __file__]
    assert setup_message(*neither) == "DATASETS.TRAIN is empty: name a dataset"
    assert setup_message(*neither, eval_only=True) == "DATASETS.TEST is empty: name a dataset"


def test_what_has_no_optimizer_cannot_be_resumed(shapes, trained_run, tmp_path):
    contents = torch.load(trained_run / "model_final.pth", weights_only=True)
    torch.save(contents | {"trainer": {"iteration": 1}}, tmp_path / "model_0000001.pth")
    message = setup_message("OUTPUT_DIR", str(tmp_path), resume=True)
    assert message.startswith(f"{tmp_path}/model_0000001.pth has no optimizer") and "MODEL.WEIGHTS" in message
    # Without torch's newer files, which alone can be mapped.
    path = tmp_path / "model_0000001.pth"
    torch.save(contents, path, _use_new_zipfile_serialization=False)
    check_setup(small_config("retinanet", "OUTPUT_DIR", str(tmp_path)), resume=True)


def test_variant_is_checked_first():
    assert "did you mean 'vil_tiny_rpb'" in setup_message("MODEL.TRANSFORMER.NAME", "vil_tinny_rpb")


@pytest.mark.parametrize("key", ["TRAIN", "TEST"])
def test_datasets_are_checked_first(shapes, key):
    assert "did you mean 'shapes_val'" in setup_message(f"DATASETS.{key}", "('shapes_vall',)")


def test_weights_are_checked_first(shapes, tmp_path):
    absent = str(tmp_path / "absent.pth")
    assert setup_message("MODEL.WEIGHTS", absent) == f"there is no weights file {absent} (MODEL.WEIGHTS)"
    assert setup_message(eval_only=True).startswith("MODEL.WEIGHTS is empty")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["MODEL.FPN.NORM", "foo"], "^MODEL.FPN.NORM is 'foo': detectron2 knows nothing"),
        (["MODEL.META_ARCHITECTURE", "foo"], "^MODEL.META_ARCHITECTURE is 'foo'"),
        (["MODEL.TRANSFORMER.SHARED_PROJECTIONS", "maybe"], "shared_projections='maybe': it is True or False"),
        (["MODEL.TRANSFORMER.RANK", "[8, 8, 8, 8]"], "rank has no effect: no stage has long_short attention"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(shapes, overrides, message):
    with pytest.raises(InputError, match=message):
        check_setup(small_config("retinanet", *overrides))


@pytest.mark.parametrize(
    "overrides", [["MODEL.FPN.OUT_CHANNELS", "64"], ["MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_9_1_rpb"]]
)
def test_a_base_config_with_a_runs_checkpoint_names_the_runs_own(shapes, tmp_path, overrides):
    weights = tmp_path / "model_final.pth"
    torch.save({"model": lively_detector(small_config()).state_dict()}, weights)
    keys = [*overrides, "MODEL.WEIGHTS", str(weights)]
    assert "config.yaml" not in setup_message(*keys, eval_only=True)
    (tmp_path / "config.yaml").write_text(small_config().dump())
    text = setup_message(*keys, eval_only=True)
    assert text.endswith(f"; its run's own is --config-file {tmp_path}/config.yaml")


def test_synchronised_batch_norm_in_several_processes_on_the_cpu(shapes):
    options = ["MODEL.TRANSFORMER.NAME", "lit_ti", "MODEL.TRANSFORMER.BATCH_NORM"]
    message = setup_message(*options, "sync", processes=2)
    assert "is a synchronised batch norm, which needs GPUs: on the CPU train in one process" in message
    check_setup(small_config("retinanet", *options, "sync"))
    check_setup(small_config("retinanet", *options, "batch"), processes=2)
