"""configs/mask_rcnn/vil_tiny_rpb_1x.yaml as a LazyConfig, with the same figures.

    python tools/lazyconfig_train_net.py --config-file configs/lazy/mask_rcnn_vil_tiny_rpb.py --num-gpus 8 \\
        train.init_checkpoint=PRETRAINED.pth
"""

from .common.data import dataloader
from .common.models import mask_rcnn as model
from .common.optim import optimizer
from .common.schedule import lr_multiplier
from .common.train import train

__all__ = ["dataloader", "lr_multiplier", "model", "optimizer", "train"]

model.backbone.bottom_up.drop_path_rate = 0.05
dataloader.train.dataset.num_classes = "${model.roi_heads.num_classes}"
dataloader.train.dataset.masks = True
