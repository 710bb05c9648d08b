"""detectron2's RetinaNet and Mask R-CNN with a backbone of this project: configs/base/{retinanet,mask_rcnn}.yaml."""

from detectron2 import model_zoo
from detectron2.config import LazyCall as L

from projects_vil.modeling import TransformerBackbone, stage_channels

retinanet = model_zoo.get_config("common/models/retinanet.py").model
retinanet.backbone.bottom_up = L(TransformerBackbone)(
    name="vil_tiny_rpb", out_features=["stage2", "stage3", "stage4"], drop_path_rate=0.1
)
retinanet.backbone.in_features = "${.bottom_up.out_features}"
retinanet.backbone.top_block.in_channels = L(stage_channels)(name="${...bottom_up.name}", stage="${..in_feature}")
retinanet.backbone.top_block.in_feature = "${..bottom_up.out_features[2]}"

mask_rcnn = model_zoo.get_config("common/models/mask_rcnn_fpn.py").model
mask_rcnn.backbone.bottom_up = L(TransformerBackbone)(
    name="vil_tiny_rpb", out_features=["stage1", "stage2", "stage3", "stage4"], drop_path_rate=0.1
)

for _model in (retinanet, mask_rcnn):
    # The input of the pretrained backbones; the loaders use the same format.
    _model.input_format = "RGB"
    _model.pixel_mean = [123.675, 116.280, 103.530]
    _model.pixel_std = [58.395, 57.120, 57.375]
