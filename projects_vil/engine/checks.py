"""What can be found wrong with a run in a second, before it starts."""

from pathlib import Path

from detectron2.config import CfgNode

from backbones import InputError
from projects_vil.checkpoint import check_weights
from projects_vil.config import check_device
from projects_vil.data import check_files
from projects_vil.modeling import build_on_meta


def check_setup(cfg: CfgNode, *, processes: int = 1, eval_only: bool = False, resume: bool = False) -> None:
    """Whether the model, devices, datasets and weights that a run needs are there.

    Raises:
        InputError: for the first that is not.
    """
    model = build_on_meta(cfg)
    on_gpu = check_device(cfg)
    if cfg.SOLVER.AMP.ENABLED and not eval_only and not on_gpu:
        raise InputError("SOLVER.AMP.ENABLED is True, and AMP needs MODEL.DEVICE cuda: set it to False")
    if not eval_only and cfg.SOLVER.IMS_PER_BATCH % max(processes, 1):
        raise InputError(f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}, no multiple of {processes} processes")
    if not cfg.DATASETS.TEST and eval_only or not cfg.DATASETS.TRAIN and not eval_only:
        raise InputError(f"DATASETS.{'TEST' if eval_only else 'TRAIN'} is empty: name a dataset")
    for name in (*cfg.DATASETS.TEST, *(() if eval_only else cfg.DATASETS.TRAIN)):
        check_files(name)
    last = Path(cfg.OUTPUT_DIR) / "last_checkpoint"
    if resume and last.is_file():
        check_weights(cfg, str(last.with_name(last.read_text().strip())), complete=True, model=model)
        return
    if eval_only and not cfg.MODEL.WEIGHTS:
        raise InputError("MODEL.WEIGHTS is empty: name the checkpoint to evaluate")
    if cfg.MODEL.WEIGHTS:
        check_weights(cfg, cfg.MODEL.WEIGHTS, complete=eval_only, model=model)
