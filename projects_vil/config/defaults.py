"""The configuration keys of this project."""

from detectron2.config import CfgNode as CN


def add_vil_config(cfg: CN) -> None:
    """Add ``MODEL.TRANSFORMER`` and the solver's and datasets' keys of this project to a detectron2 config.

    A config that names none of them means what it means in detectron2.
    """
    cfg.MODEL.TRANSFORMER = CN()
    # A name of backbones.list_variants(): vil_tiny_rpb has relative bias, vil_tiny absolute positions.
    cfg.MODEL.TRANSFORMER.NAME = "vil_tiny_rpb"
    # Stages that feed FPN; empty for those in MODEL.FPN.IN_FEATURES.
    cfg.MODEL.TRANSFORMER.OUT_FEATURES = []
    # Rate of stochastic depth of the last block, growing linearly from 0 at the first.
    cfg.MODEL.TRANSFORMER.DROP_PATH = 0.1
    # Largest image side in pixels, for tables of positions that are not resized to each map.
    cfg.MODEL.TRANSFORMER.MAX_IMG_SIZE = 1333
    # Compute activations again in the backward pass: less memory, about a third more time.
    cfg.MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING = False
    # "auto" (the fastest on the device), "sdpa" (PyTorch's), "triton" (ViL's sliding chunks, on CUDA) or "reference"
    # (quadratic, for debugging).
    cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND = "auto"
    # What follows is the variant's own where it is empty; a key that the variant's family does not have is an error.
    # ViL and LS: the attention of each stage, "sliding_chunk", "long_short" or "dense".
    cfg.MODEL.TRANSFORMER.ATTENTION = []
    # ViL: "zero_pad", "exact" or "cyclic" (appendix C).
    cfg.MODEL.TRANSFORMER.ATTENTION_MODE = ""
    # ViL and LS: global tokens of each stage.
    cfg.MODEL.TRANSFORMER.GLOBAL_TOKENS = []
    # ViL, LS and CvT: sides of the chunks or segments in tokens (7 is ViL's window of 15), of each stage.
    cfg.MODEL.TRANSFORMER.WINDOW_SIZE = []
    # LS and CvT: rank of the dynamic projection of each stage.
    cfg.MODEL.TRANSFORMER.RANK = []
    # ViL: whether local and global tokens share their projections, as in the released models.
    cfg.MODEL.TRANSFORMER.SHARED_PROJECTIONS = None
    # LIT: "deformable" or "uniform" (which has no offsets: empty SOLVER.LR_MULTIPLIERS too).
    cfg.MODEL.TRANSFORMER.MERGING = ""
    # LIT's deformable merging and CvT's projections: "batch", "frozen" or "sync".
    cfg.MODEL.TRANSFORMER.BATCH_NORM = ""
    # ViL, LS and LIT: "load" for tables of positions that are resized once, when weights are loaded, to MAX_IMG_SIZE;
    # "map" for tables that are resized to each map; empty as in each paper (docs/checkpoints.md).
    cfg.MODEL.TRANSFORMER.POSITION_RESIZING = ""
    # Performer: iterations between two samplings of its random features (ViL, appendix D: 1000 in detection).
    cfg.MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD = 1000
    # ViL: the share of training, 0 for none of it to 1, in which a token sees one of the eight chunks round its own,
    # sampled for each layer and iteration. It takes less time; the official configs have 0.875. Evaluation sees all.
    cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL = 0.0

    # Averaged weights, which are evaluated and a checkpoint's "model". After each step the average becomes
    # d average + (1 - d) weights, with d = min(DECAY, (1 + n) / (10 + n)) after n steps.
    cfg.MODEL.EMA = CN()
    cfg.MODEL.EMA.ENABLED = False
    cfg.MODEL.EMA.DECAY = 0.9998

    # Whether training may start from the beginning in an OUTPUT_DIR that has checkpoints.
    cfg.OVERWRITE_OUTPUT_DIR = False
    # How many numbered checkpoints are kept, the newest; 0 for all.
    cfg.SOLVER.CHECKPOINT_KEEP = 0
    # The metric whose best checkpoint is kept as model_best.pth, "bbox/AP" for one; empty for none. More is better, and
    # less of a "validation_loss/...".
    cfg.TEST.BEST_METRIC = ""
    # Whether evaluations compute the losses on DATASETS.TEST too: validation_loss/... in metrics.json.
    cfg.TEST.LOSS = False
    # What computes AP of boxes and masks: "pycocotools", or "faster_coco_eval" for the same numbers sooner.
    cfg.TEST.COCO_API = "pycocotools"
    # How many validation images are rendered into OUTPUT_DIR/drawings at each evaluation, 0 to 32.
    cfg.TEST.DRAW_IMAGES = 4

    cfg.LOGGING = CN()
    # The project at Weights & Biases, and the experiment of MLflow, that curves go to; empty for none.
    cfg.LOGGING.WANDB = ""
    cfg.LOGGING.MLFLOW = ""

    # "SGD", as detectron2 trains, or "ADAMW", as all configs of this project do.
    cfg.SOLVER.OPTIMIZER = "SGD"
    # Pairs of a pattern (shell style, on full parameter names) and what the learning rate is multiplied by there.
    cfg.SOLVER.LR_MULTIPLIERS = []
    # What the learning rate of a backbone's block is multiplied by once for each block behind it and once more, above 0
    # to 1, which is none: the embedding of L blocks learns at this to the power of L + 1. FPN and heads keep the rate.
    cfg.SOLVER.LAYER_DECAY = 1.0
    # 0, or how many times to train on every image: SOLVER.MAX_ITER, STEPS, WARMUP_ITERS and CHECKPOINT_PERIOD and
    # TEST.EVAL_PERIOD then follow from the number of images and IMS_PER_BATCH (projects_vil/solver.py).
    cfg.SOLVER.EPOCHS = 0
    # With SOLVER.AMP.ENABLED: "float16", which needs a GPU and scales the loss, or "bfloat16", also on the CPU.
    cfg.SOLVER.AMP.DTYPE = "float16"
    # Gradient accumulation: into how many micro-batches IMS_PER_BATCH is split; the optimizer sees the whole batch.
    cfg.SOLVER.ACCUMULATE = 1
    # The batch that BASE_LR and BASE_LR_END are meant for: they are multiplied by IMS_PER_BATCH / this; 0 for never.
    cfg.SOLVER.SCALE_LR_TO_BATCH = 0
    # How many batches whose loss or gradient is not finite a run leaves out before it stops (diverged.json).
    cfg.SOLVER.SKIP_DIVERGED = 0
    # After how many evaluations without a better TEST.BEST_METRIC a run ends; 0 for never.
    cfg.SOLVER.EARLY_STOPPING_PATIENCE = 0
    # The exponent of SOLVER.LR_SCHEDULER_NAME WarmupPolyLR, which falls from BASE_LR to BASE_LR_END.
    cfg.SOLVER.POLY_LR_POWER = 0.9

    # Semantic segmentation: a crop is sampled again, up to ten times, where one class has more than this share of it.
    cfg.INPUT.CROP.SINGLE_CATEGORY_MAX_AREA = 1.0
    # The same: whether an image smaller than an absolute crop is padded to its size, with MODEL.PIXEL_MEAN and ignored
    # labels. Else only batches are padded, to their largest image.
    cfg.INPUT.CROP.PAD = False
    # What becomes of a training image: "default" is resized to MIN_SIZE_TRAIN and flipped, "lsj" is large-scale jitter
    # (below) and a flip, "strong" is lsj, PHOTOMETRIC_DISTORTION and COPY_PASTE, which needs an R-CNN with masks.
    cfg.INPUT.AUGMENTATION = "default"
    # lsj and strong: an image is scaled to fit into a square of SIZE pixels times a random factor from SCALE, then
    # cropped or padded to the square, as in the new baselines of detectron2.
    cfg.INPUT.LSJ = CN()
    cfg.INPUT.LSJ.SIZE = 1024
    cfg.INPUT.LSJ.SCALE = (0.1, 2.0)
    # strong: the share of images that get objects of another training image pasted, 0.0 for none.
    cfg.INPUT.COPY_PASTE = CN()
    cfg.INPUT.COPY_PASTE.PROBABILITY = 0.5
    # In training: random brightness, contrast, saturation and hue, as in SSD.
    cfg.INPUT.PHOTOMETRIC_DISTORTION = False

    # A COCO file with errors, before training and evaluation (docs/datasets.md): "error" stops, "warn" names them and
    # goes on without them, "off" does not check.
    cfg.DATASETS.CHECK = "error"
    # COCO-format datasets to register: [name, annotation file, image folder], each.
    cfg.DATASETS.COCO = []
    # Those in the layout of ADE20K, whose label images have 0 for ignored, classes from 1: [name, image folder, label
    # folder], each, for its 150 classes, or [name, image folder, label folder, file with a class name a line].
    cfg.DATASETS.ADE20K = []
