"""The model of configs/retinanet/vil_tiny_1x.yaml as a LazyConfig, for projects that are built on those.

    from detectron2.config import LazyConfig, instantiate
    model = instantiate(LazyConfig.load("configs/lazy/retinanet_vil_tiny.py").model)
"""

from detectron2 import model_zoo
from detectron2.config import LazyCall as L

from backbones import create_backbone
from projects_vil.modeling import TransformerBackbone

STAGES = ["stage2", "stage3", "stage4"]

model = model_zoo.get_config("common/models/retinanet.py").model
model.backbone.bottom_up = L(TransformerBackbone)(name="vil_tiny_rpb", out_features=STAGES, drop_path_rate=0.05)
model.backbone.in_features = STAGES
model.backbone.top_block.in_channels = create_backbone("vil_tiny_rpb").feature_info[STAGES[-1]].channels
model.backbone.top_block.in_feature = STAGES[-1]
model.input_format = "RGB"  # the loader must give the same
model.pixel_mean = [123.675, 116.280, 103.530]
model.pixel_std = [58.395, 57.120, 57.375]
