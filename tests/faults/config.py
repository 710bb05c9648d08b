"""Keys, values and files of configs, and arguments of tools."""

import shlex

from tests.faults.fault import OUTPUT, TRAIN, Fault
from tests.faults.spoiling import made_a_folder, written

_VALUES = (
    ("SOLVER.MAX_ITER", "None"),
    ("SOLVER.MAX_ITER", "0"),
    ("SOLVER.MAX_ITER", "-5"),
    ("SOLVER.MAX_ITER", "many"),
    ("SOLVER.IMS_PER_BATCH", "0"),
    ("SOLVER.IMS_PER_BATCH", "-2"),
    ("SOLVER.CHECKPOINT_PERIOD", "0"),
    ("SOLVER.CHECKPOINT_KEEP", "-1"),
    ("SOLVER.BASE_LR", "-0.1"),
    ("SOLVER.BASE_LR", "1"),
    ("SOLVER.BASE_LR_END", "-1.0"),
    ("SOLVER.WEIGHT_DECAY", "-1.0"),
    ("SOLVER.MOMENTUM", "2.0"),
    ("SOLVER.WARMUP_ITERS", "-1"),
    ("SOLVER.WARMUP_METHOD", "cubic"),
    ("SOLVER.OPTIMIZER", "ADAM"),
    ("SOLVER.LR_SCHEDULER_NAME", "Cosine"),
    ("SOLVER.LR_MULTIPLIERS", "[['backbone']]"),
    ("SOLVER.LAYER_DECAY", "1.5"),
    ("SOLVER.STEPS", "(10, 5)"),
    ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "-1.0"),
    ("SOLVER.ACCUMULATE", "0"),
    ("SOLVER.ACCUMULATE", "4"),
    ("SOLVER.SCALE_LR_TO_BATCH", "-1"),
    ("SOLVER.SKIP_DIVERGED", "-1"),
    ("SOLVER.EARLY_STOPPING_PATIENCE", "3"),
    ("SOLVER.AMP.ENABLED", "True"),
    ("SOLVER.AMP.DTYPE", "half"),
    ("SOLVER.REFERENCE_WORLD_SIZE", "-8"),
    ("MODEL.EMA.DECAY", "1.0"),
    ("MODEL.DEVICE", "tpu"),
    ("MODEL.PIXEL_STD", "[1.0, 1.0]"),
    ("MODEL.PIXEL_STD", "[1.0, 0.0, 1.0]"),
    ("MODEL.PIXEL_MEAN", "[1.0]"),
    ("MODEL.META_ARCHITECTURE", "DETR"),
    ("MODEL.FPN.NORM", "BatchNrm"),
    ("MODEL.BACKBONE.FREEZE_AT", "9"),
    ("MODEL.TRANSFORMER.NAME", "vil_tinny_rpb"),
    ("MODEL.TRANSFORMER.ATTENTION_BACKEND", "flash"),
    ("MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton"),
    ("MODEL.TRANSFORMER.RANK", "[8, 8, 8, 8]"),
    ("MODEL.TRANSFORMER.OUT_FEATURES", "['stage9']"),
    ("MODEL.TRANSFORMER.DROP_PATH", "1.5"),
    ("MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL", "2.0"),
    ("INPUT.RANDOM_FLIP", "diagonal"),
    ("INPUT.MIN_SIZE_TRAIN", "(0,)"),
    ("INPUT.MIN_SIZE_TRAIN", "64"),
    ("INPUT.FORMAT", "HSV"),
    ("SOLVER.STEPS", "('a', 5)"),
    ("SOLVER.WARMUP_FACTOR", "-1.0"),
    ("SEED", "99999999999999999999"),
    ("MODEL.FPN.OUT_CHANNELS", "-4"),
    ("INPUT.MASK_FORMAT", "rle"),
    ("INPUT.MIN_SIZE_TEST", "-1"),
    ("DATALOADER.NUM_WORKERS", "-1"),
    ("DATALOADER.SAMPLER_TRAIN", "TrainSampler"),
    ("DATASETS.CHECK", "eror"),
    ("TEST.EVAL_PERIOD", "-1"),
    ("TEST.BEST_METRIC", "bbox/ap"),
    ("TEST.BEST_METRIC", "segm/AP"),
    ("TEST.BEST_METRIC", "validation_loss/total_loss"),
    ("TEST.DETECTIONS_PER_IMAGE", "0"),
    ("TEST.COCO_API", "pycoco"),
    ("OUTPUT_DIR", ""),
    ("OUTPUT_DIR", "small.yaml"),
)

_RESNET = (
    "MODEL.BACKBONE.NAME build_retinanet_resnet_fpn_backbone MODEL.RESNETS.OUT_FEATURES \"['res3', 'res4', 'res5']\" "
    "MODEL.FPN.IN_FEATURES \"['res3', 'res4', 'res5']\""
)
_ROBUSTNESS = "evaluate_robustness.py --data sets --weights"
_CLASS = "sets/val/n01440764"

FAULTS = (
    *(Fault(f"{key} {value or repr(value)}", f"{TRAIN} {key} {shlex.quote(value)}") for key, value in _VALUES),
    Fault("INPUT.CROP.TYPE relativ", f"{TRAIN} INPUT.CROP.ENABLED True INPUT.CROP.TYPE relativ"),
    Fault("two keys that scale the rate", f"{TRAIN} SOLVER.SCALE_LR_TO_BATCH 16 SOLVER.REFERENCE_WORLD_SIZE 8"),
    Fault(
        "a last rate above the first, over an older run",
        "train_net.py --config-file run/config.yaml OVERWRITE_OUTPUT_DIR True SOLVER.LR_SCHEDULER_NAME WarmupPolyLR "
        "SOLVER.BASE_LR 1e-7 SOLVER.BASE_LR_END 1e-6",
        parts=("run",),
    ),
    Fault("layers of a backbone that does not know them", f"{TRAIN} {_RESNET} SOLVER.LAYER_DECAY 0.8"),
    Fault(
        "a warm-up that never ends",
        f"{TRAIN} SOLVER.WARMUP_ITERS 50",
        status=0,
        line="SOLVER.WARMUP_ITERS is 50",
        makes=OUTPUT,
    ),
    Fault("an unknown key", f"{TRAIN} SOLVER.MAXITER 3"),
    Fault("a key without a value", f"{TRAIN} SOLVER.MAX_ITER"),
    Fault("a pair as one word", f"{TRAIN} SOLVER.MAX_ITER=3"),
    Fault("a key below a value", f"{TRAIN} SOLVER.MAX_ITER.MORE 3"),
    Fault("no config", "train_net.py"),
    Fault("a config that is missing", "train_net.py --config-file absent.yaml"),
    Fault("a config that is a folder", "train_net.py --config-file own"),
    Fault("a config that is no YAML", "train_net.py --config-file bad.yaml", written("bad.yaml", "SOLVER: [1, 2\n")),
    Fault("a config that is a list", "train_net.py --config-file bad.yaml", written("bad.yaml", "- SOLVER\n")),
    Fault(
        "a config with an unknown key",
        "train_net.py --config-file bad.yaml",
        written("bad.yaml", "SOLVER:\n  MAXITER: 3\n"),
    ),
    Fault(
        "a config with text for a number",
        "train_net.py --config-file bad.yaml",
        written("bad.yaml", "SOLVER:\n  MAX_ITER: many\n"),
    ),
    Fault(
        "a config that runs code",
        "train_net.py --config-file bad.yaml",
        written("bad.yaml", "SOLVER: !!python/object/apply:os.system ['touch made']\n"),
    ),
    Fault(
        "a _BASE_ that is missing", "train_net.py --config-file bad.yaml", written("bad.yaml", "_BASE_: absent.yaml\n")
    ),
    Fault("a _BASE_ that is a folder", "train_net.py --config-file bad.yaml", written("bad.yaml", "_BASE_: own\n")),
    Fault("a _BASE_ that leads back", "train_net.py --config-file bad.yaml", written("bad.yaml", "_BASE_: bad.yaml\n")),
    Fault("a LazyConfig that is missing", "lazyconfig_train_net.py --config-file absent.py"),
    Fault("a LazyConfig that raises", "lazyconfig_train_net.py --config-file bad.py", written("bad.py", "1 / 0\n")),
    Fault(
        "a LazyConfig without its parts",
        "lazyconfig_train_net.py --config-file bad.py",
        written("bad.py", "train = dict()\n"),
    ),
    Fault(
        "an unknown key of a LazyConfig",
        "lazyconfig_train_net.py --config-file configs/lazy/retinanet_vil_tiny.py train.max_itr=3",
    ),
    Fault("an unknown argument", f"{TRAIN} --resumee", status=2),
    Fault("an unknown format", "export_model.py --config-file small.yaml --output out --format onnxx", status=2),
    Fault("analysis of an unknown variant", "analyze_model.py --variants vil_tinny"),
    Fault("analysis at no size", "analyze_model.py --config-file small.yaml --size 0 5"),
    Fault("figures into no folder", "analyze_model.py --config-file small.yaml --no-flops --json absent/counts.json"),
    Fault("figures over a folder", "analyze_model.py --config-file small.yaml --no-flops --json own"),
    Fault("a benchmark of no runs", "benchmark.py --models vil_tiny --runs 0"),
    Fault("a schedule of no epochs", "plan_schedule.py --config-file small.yaml --epochs 0"),
    Fault(
        "attention of a stage that is none",
        "visualize_attention.py --config-file small.yaml --input photos/a.jpg --output drawn "
        "--stage 9 --block 1 --point 5 5",
    ),
    Fault(
        "offsets of a backbone without",
        "visualize_offsets.py --config-file small.yaml --input photos/a.jpg --output drawn",
    ),
    Fault("robustness on no folder", f"{_ROBUSTNESS} absent.pth"),
    Fault("robustness on an unknown set", f"{_ROBUSTNESS} absent.pth --sets val v3", made_a_folder(_CLASS)),
    Fault("robustness on sets that are missing", f"{_ROBUSTNESS} absent.pth --sets val v2 a", made_a_folder("sets")),
    Fault("robustness on an empty class", f"{_ROBUSTNESS} small.yaml --sets val", made_a_folder(_CLASS)),
    Fault(
        "robustness on a class of another set",
        f"{_ROBUSTNESS} small.yaml --sets a",
        written("sets/imagenet-a/n01440764/a.jpg", "a tench"),
    ),
    Fault(
        "robustness of weights that are missing",
        f"{_ROBUSTNESS} absent.pth --sets val",
        written(f"{_CLASS}/a.JPEG", "a tench"),
    ),
    Fault(
        "robustness of a detector",
        f"{_ROBUSTNESS} run/model_final.pth --sets val",
        written(f"{_CLASS}/a.JPEG", "a tench"),
        parts=("run",),
    ),
)
