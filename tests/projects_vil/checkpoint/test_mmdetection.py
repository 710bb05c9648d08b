"""Official detectors of LIT and LITv2: mmdetection's formulas and our models give the same detections.

The formulas are restated from mmdetection 2.11 in the repositories of LIT and LITv2 (detection/mmdet: necks/fpn.py,
dense_heads, roi_heads, core/anchor, core/bbox/coder). R: anchors or regions, K: classes.
"""

import pytest
import torch
import torch.nn.functional as F
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from backbones import ConfigError
from backbones.build import VARIANTS
from backbones.convert import detect_format
from projects_vil import Checkpointer, load_config
from projects_vil.checkpoint import check_weights, convert_file, convert_official
from tests import layouts
from tests.backbones import official_lit
from tests.projects_vil.checkpoint.test_checkpointer import LOG, log_of, save
from tests.projects_vil.helpers import ROOT, assert_same_detections, message

WIDTH, CLASSES, FC_DIM, SIZE = 8, 3, 16, (64, 96)
SMALL = {"lit_small": official_lit.TI, "litv2_small": official_lit.V2}
KEYS = ["MODEL.DEVICE", "cpu", "MODEL.FPN.OUT_CHANNELS", str(WIDTH)]
KEYS += ["MODEL.RETINANET.NUM_CLASSES", str(CLASSES), "MODEL.ROI_HEADS.NUM_CLASSES", str(CLASSES)]
KEYS += ["MODEL.ROI_BOX_HEAD.FC_DIM", str(FC_DIM), "MODEL.ROI_MASK_HEAD.CONV_DIM", str(WIDTH)]
# mmdetection keeps the best anchors of a level, and detectron2 the best pairs of anchor and class. Here, both keep all.
KEYS += ["MODEL.RETINANET.SCORE_THRESH_TEST", "0.6", "MODEL.RETINANET.TOPK_CANDIDATES_TEST", "100000"]
KEYS += ["TEST.DETECTIONS_PER_IMAGE", "1000"]


class Heads(dict[str, Tensor]):
    """Return random FPN and heads with mmdetection's names. ``heads(name, x)`` applies a layer."""

    def __init__(self, retinanet: bool, variant: str = "lit_small") -> None:
        super().__init__()
        widths = [stage.dim for stage in SMALL[variant].stages]
        generator = torch.Generator().manual_seed(3)

        def add(name: str, out: int, *inputs: int) -> None:
            # With small deltas, no clipped box is empty. detectron2 drops more empty boxes than mmdetection.
            scale = {"_reg": 2e-4, "_cls": 0.1}.get(name[-4:], 2) / torch.Size(inputs).numel()
            self[f"{name}.weight"] = torch.randn(out, *inputs, generator=generator) * scale**0.5
            self[f"{name}.bias"] = 0.1 * torch.randn(out, generator=generator)

        dims = widths[1:] if retinanet else widths
        for index, dim in enumerate(dims):
            add(f"neck.lateral_convs.{index}.conv", WIDTH, dim, 1, 1)
            add(f"neck.fpn_convs.{index}.conv", WIDTH, WIDTH, 3, 3)
        if retinanet:
            add("neck.fpn_convs.3.conv", WIDTH, dims[-1], 3, 3)
            add("neck.fpn_convs.4.conv", WIDTH, WIDTH, 3, 3)
            for branch, out in (("cls", 9 * CLASSES), ("reg", 9 * 4)):
                for index in range(4):
                    add(f"bbox_head.{branch}_convs.{index}.conv", WIDTH, WIDTH, 3, 3)
                add(f"bbox_head.retina_{branch}", out, WIDTH, 3, 3)
            return
        add("rpn_head.rpn_conv", WIDTH, WIDTH, 3, 3)
        add("rpn_head.rpn_cls", 3, WIDTH, 1, 1)
        add("rpn_head.rpn_reg", 12, WIDTH, 1, 1)
        add("roi_head.bbox_head.shared_fcs.0", FC_DIM, WIDTH * 49)
        add("roi_head.bbox_head.shared_fcs.1", FC_DIM, FC_DIM)
        add("roi_head.bbox_head.fc_cls", CLASSES + 1, FC_DIM)
        add("roi_head.bbox_head.fc_reg", 4 * CLASSES, FC_DIM)
        for index in range(4):
            add(f"roi_head.mask_head.convs.{index}.conv", WIDTH, WIDTH, 3, 3)
        add("roi_head.mask_head.upsample", WIDTH, WIDTH, 2, 2)
        add("roi_head.mask_head.conv_logits", CLASSES, WIDTH, 1, 1)

    def __call__(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight, bias = self[f"{name}.weight"].to(x), self[f"{name}.bias"].to(x)
        if weight.ndim == 2:
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, stride=stride, padding=weight.shape[-1] // 2)

    def fpn(self, features: list[Tensor], *, convolved: bool) -> list[Tensor]:
        laterals = [self(f"neck.lateral_convs.{index}.conv", x) for index, x in enumerate(features)]
        for index in range(len(laterals) - 1, 0, -1):
            laterals[index - 1] = laterals[index - 1] + F.interpolate(laterals[index], laterals[index - 1].shape[2:])
        levels = [self(f"neck.fpn_convs.{index}.conv", x) for index, x in enumerate(laterals)]
        if not convolved:
            return [*levels, levels[-1][:, :, ::2, ::2]]
        p6 = self("neck.fpn_convs.3.conv", features[-1], stride=2)
        return [*levels, p6, self("neck.fpn_convs.4.conv", p6, stride=2)]


def anchors(level: Tensor, stride: int, scales: list[float]) -> Tensor:
    """(R, 4), by row, column, aspect ratio (height / width) and scale; the first is centered at 0."""
    height, width = level.shape[2:]
    root, sizes = torch.tensor([0.5, 1.0, 2.0]).sqrt()[:, None], stride * torch.tensor(scales)
    widths, heights = (sizes / root).flatten(), (sizes * root).flatten()
    cells = torch.cartesian_prod(torch.arange(height) * stride, torch.arange(width) * stride).flip(1).repeat(1, 2)
    return (cells[:, None] + torch.stack([-widths, -heights, widths, heights], dim=1) / 2).flatten(0, 1)


def decode(boxes: Tensor, deltas: Tensor, stds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> Tensor:
    """(R, 4) and (R, ..., 4) -> (R, ..., 4)"""
    deltas = deltas * torch.tensor(stds)
    boxes = boxes.reshape(len(boxes), *[1] * (deltas.ndim - 2), 4)
    sides, limit = boxes[..., 2:] - boxes[..., :2], torch.tensor(16 / 1000).log().abs()
    centers = (boxes[..., :2] + boxes[..., 2:]) / 2 + deltas[..., :2] * sides
    sides = sides * deltas[..., 2:].clamp(-limit, limit).exp()
    return torch.cat([centers - sides / 2, centers + sides / 2], dim=-1)


def rows(maps: Tensor, channels: int) -> Tensor:
    return maps[0].permute(1, 2, 0).reshape(-1, channels)


def best(boxes: Tensor, scores: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """(R, K, 4) and (R, K) -> boxes, scores and classes of the best after NMS by class."""
    index, classes = (scores > threshold).nonzero(as_tuple=True)
    boxes, scores = boxes[index, classes], scores[index, classes]
    kept = batched_nms(boxes, scores, classes, 0.5)[:1000]
    return boxes[kept], scores[kept], classes[kept]


def retinanet(heads: Heads, features: list[Tensor]) -> tuple[Tensor, ...]:
    boxes, scores = [], []
    for level, stride in zip(heads.fpn(features, convolved=True), (8, 16, 32, 64, 128), strict=True):
        branches = {"cls": level, "reg": level}
        for name in branches:
            for index in range(4):
                branches[name] = heads(f"bbox_head.{name}_convs.{index}.conv", branches[name]).relu()
        grid = anchors(level, stride, [4 * 2 ** (octave / 3) for octave in range(3)])
        boxes.append(decode(grid, rows(heads("bbox_head.retina_reg", branches["reg"]), 4)))
        scores.append(rows(heads("bbox_head.retina_cls", branches["cls"]), CLASSES).sigmoid())
    scores = torch.cat(scores)
    found, *others = best(torch.cat(boxes)[:, None].expand(-1, CLASSES, 4), scores, 0.6)
    # mmdetection clips before NMS; detectron2 after it, and drops boxes outside of the image.
    found = clip_boxes_to_image(found, SIZE)
    inside = (found[:, 2:] > found[:, :2]).all(dim=1)
    return tuple(values[inside] for values in (found, *others))


def mask_rcnn(heads: Heads, features: list[Tensor]) -> tuple[Tensor, ...]:
    levels, strides = heads.fpn(features, convolved=False), (4, 8, 16, 32, 64)
    boxes, scores, numbers = [], [], []
    for number, (level, stride) in enumerate(zip(levels, strides, strict=True)):
        hidden = heads("rpn_head.rpn_conv", level).relu()
        objectness, order = rows(heads("rpn_head.rpn_cls", hidden), 1)[:, 0].sort(descending=True)
        order = order[:1000]
        deltas = rows(heads("rpn_head.rpn_reg", hidden), 4)[order]
        boxes.append(clip_boxes_to_image(decode(anchors(level, stride, [8.0])[order], deltas), SIZE))
        scores.append(objectness[:1000])
        numbers.append(torch.full_like(order, number))
    boxes = torch.cat(boxes)
    proposals = boxes[batched_nms(boxes, torch.cat(scores), torch.cat(numbers), 0.7)[:1000]]
    hidden = pooled(levels, proposals, 7).flatten(1)
    for index in range(2):
        hidden = heads(f"roi_head.bbox_head.shared_fcs.{index}", hidden).relu()
    deltas = heads("roi_head.bbox_head.fc_reg", hidden).unflatten(1, (CLASSES, 4))
    decoded = clip_boxes_to_image(decode(proposals, deltas, (0.1, 0.1, 0.2, 0.2)), SIZE)
    scores = heads("roi_head.bbox_head.fc_cls", hidden).softmax(1)[:, :CLASSES]
    found, scores, classes = best(decoded, scores, 0.05)
    x = pooled(levels, found, 14)
    for index in range(4):
        x = heads(f"roi_head.mask_head.convs.{index}.conv", x).relu()
    name = "roi_head.mask_head.upsample"
    x = F.conv_transpose2d(x, heads[f"{name}.weight"].to(x), heads[f"{name}.bias"].to(x), stride=2).relu()
    masks = heads("roi_head.mask_head.conv_logits", x).sigmoid()
    return found, scores, classes, masks[torch.arange(len(classes)), classes][:, None]


def pooled(levels: list[Tensor], boxes: Tensor, side: int) -> Tensor:
    sizes = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    numbers = (sizes / 56 + 1e-6).log2().floor().clamp(0, 3)
    regions = torch.zeros(len(boxes), levels[0].shape[1], side, side, dtype=levels[0].dtype)
    for number, stride in enumerate((4, 8, 16, 32)):
        inside = numbers == number
        if inside.any():
            regions[inside] = roi_align(levels[number], [boxes[inside]], side, 1 / stride, 0, aligned=True)
    return regions


FORMULAS = {"retinanet": retinanet, "mask_rcnn": mask_rcnn}


@pytest.fixture(autouse=True)
def small_variant(monkeypatch):
    for name, variant in SMALL.items():
        monkeypatch.setitem(VARIANTS, name, variant)


def backbone_weights(variant: str = "lit_small") -> dict[str, Tensor]:
    weights = official_lit.official_state_dict(SMALL[variant], classifier=False)
    return {k: t.float() if t.is_floating_point() else t for k, t in weights.items()}


def contents(heads: dict[str, Tensor]) -> dict:
    return layouts.mmdetection(backbone_weights(), heads)


def config_of(name: str, *overrides: str, variant: str = "lit_small"):
    keys = ["MODEL.TRANSFORMER.VARIANT", variant, *KEYS, *overrides]
    return load_config(ROOT / f"configs/{name}/lit_ti_1x.yaml", keys)


def loaded(name: str, path: str, variant: str) -> nn.Module:
    cfg = config_of(name, variant=variant)
    model = build_model(cfg)
    Checkpointer(model, cfg=cfg, complete=True).load(path)
    return model.eval()


@pytest.mark.parametrize("variant", SMALL)
@pytest.mark.parametrize("name", FORMULAS)
@torch.no_grad()
def test_detections_equal_mmdetection(tmp_path, name, variant):
    heads, path = Heads(name == "retinanet", variant), str(tmp_path / "official.pth")
    if variant == "lit_small":
        torch.save(contents(heads), path)
    else:
        layouts.save_mmdetection_3(backbone_weights(variant), heads, path)
    image = 255 * torch.rand(3, *SIZE, generator=torch.Generator().manual_seed(1))
    converted = convert_file(path, tmp_path / "ours.pth", variant)
    assert heads.keys() <= converted.report.mapped.keys()
    for file in (path, str(tmp_path / "ours.pth")):
        model = loaded(name, file, variant)
        inputs = [{"image": image, "height": SIZE[0], "width": SIZE[1]}]
        normalized = model.preprocess_image(inputs).tensor
        features = list(model.backbone.bottom_up.net.forward(normalized).values())
        if name == "retinanet":
            found = model(inputs)[0]["instances"]
        else:
            found = model.inference(inputs, do_postprocess=False)[0]
        boxes, scores, classes, *masks = FORMULAS[name](heads, features)
        assert len(found) == len(boxes) > 100 and len(set(classes.tolist())) == CLASSES
        theirs = Instances(found.image_size, pred_boxes=Boxes(boxes), scores=scores, pred_classes=classes)
        if masks:
            theirs.pred_masks = masks[0]
        assert_same_detections(found, theirs)


def test_a_model_with_a_relu_before_p7_is_another(tmp_path):
    path = save(tmp_path, contents(Heads(retinanet=True)))
    cfg = config_of("retinanet", "MODEL.FPN.P7_RELU", "True")
    assert "P7_RELU" in message(check_weights, cfg, path, complete=True)
    with log_of(LOG) as log:
        Checkpointer(build_model(cfg), cfg=cfg).load(path)
    assert any("P7_RELU" in line for line in log.output)


def test_classes_match_coco():
    """The order is the same. LIT's CocoDataset.CLASSES (detection/mmdet/datasets/coco.py) follow the category ids."""
    heads = Heads(retinanet=True)
    for branch, number in (("cls", 80), ("reg", 4)):
        heads[f"bbox_head.retina_{branch}.weight"] = torch.ones(9 * number, WIDTH, 3, 3)
        heads[f"bbox_head.retina_{branch}.bias"] = torch.ones(9 * number)
    saved = convert_official(detect_format(contents(heads)), "lit_small").contents["vil_detectron2"]
    assert saved["classes"][:3] == ("person", "bicycle", "car") and saved["classes"][79] == "toothbrush"
    assert saved["category_ids"][79] == 90


@pytest.mark.parametrize(
    "name, tensor, named",
    [
        ("bbox_head.retina_cls.weight", torch.ones(8, WIDTH, 3, 3), "9 anchors"),
        ("bbox_head.retina_cls.weight", None, "head.cls_score.weight"),
        ("neck.fpn_convs.5.conv.weight", torch.ones(1), "neck.fpn_convs.5.conv.weight"),
        ("bbox_head.scale", torch.ones(1), "bbox_head.scale"),
    ],
)
def test_heads_that_do_not_match(name, tensor, named):
    heads = {**Heads(retinanet=True), name: tensor}
    official = detect_format(contents({key: value for key, value in heads.items() if value is not None}))
    with pytest.raises(ConfigError, match=named):
        convert_official(official, "lit_small")
