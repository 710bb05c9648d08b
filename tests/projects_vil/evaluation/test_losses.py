"""The validation losses depend only on the weights and do not change the model."""

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage

from projects_vil import data
from projects_vil.evaluation import validation_loss
from projects_vil.evaluation.losses import _as_for_testing
from tests.projects_vil.helpers import small_config
from tests.selection import slow_except


@pytest.mark.parametrize("detector", slow_except(["retinanet", "cascade_mask_rcnn", "semantic_fpn"], ["retinanet"]))
def test_losses_do_not_change_the_model(detector, request):
    request.getfixturevalue("shapes_sem_seg" if detector == "semantic_fpn" else "shapes")
    cfg = small_config(detector, "MODEL.TRANSFORMER.DROP_PATH", "0.5", "MODEL.SEM_SEG_HEAD.NORM", "BN")
    model = build_model(cfg).train()
    model.backbone.bottom_up.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with EventStorage() as storage:
        first = validation_loss(cfg, model, cfg.DATASETS.TEST[0])
        again = validation_loss(cfg, model, cfg.DATASETS.TEST[0])
        assert not storage.latest()
    assert first == pytest.approx(again, rel=1e-4) and first.keys() > {"total_loss"}
    assert 2 * first["total_loss"] == pytest.approx(sum(first.values()), rel=1e-4)
    assert all(0 <= value < 100 for value in first.values()) and first["total_loss"] > 0
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # detectron2's initial value.
    assert getattr(model, "loss_normalizer", 100) == 100


def test_retinanet_losses_are_normalized_by_the_positive_anchors_of_the_dataset(shapes):
    cfg = small_config("retinanet")
    model = build_model(cfg)
    mapper = data.Mapper(_as_for_testing(cfg), is_train=True)
    sums, positives = {"loss_cls": 0.0, "loss_box_reg": 0.0}, 0
    model.train()
    with torch.no_grad(), EventStorage() as storage:
        for record in data.load_dataset(cfg, cfg.DATASETS.TEST, train=False):
            model.loss_normalizer = 0.0
            # The normalizer is then a tenth of the positive anchors of the image.
            losses = model([mapper(record)])
            positives += storage.latest()["num_pos_anchors"][0]
            sums = {name: sums[name] + float(value) * model.loss_normalizer for name, value in losses.items()}
    expected = {name: value / positives for name, value in sums.items()}
    losses = validation_loss(cfg, model, cfg.DATASETS.TEST[0])
    assert {name: losses[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert model.loss_normalizer > 0


@pytest.mark.parametrize(
    "keys",
    [
        ("INPUT.PHOTOMETRIC_DISTORTION", "True"),
        ("INPUT.AUGMENTATION", "lsj_copy_paste"),
        ("INPUT.ALBUMENTATIONS", "not_read.yaml"),
    ],
)
def test_images_are_not_augmented(shapes, keys):
    cfg = _as_for_testing(small_config("mask_rcnn", *keys))
    record = data.load_dataset(cfg, cfg.DATASETS.TEST, train=False)[0]
    mapped = [data.Mapper(cfg, is_train=train)(record)["image"] for train in (True, False)]
    assert torch.equal(*mapped)


def test_non_finite_proposals_give_a_loss_of_nan(shapes):
    cfg = small_config("mask_rcnn")
    model = build_model(cfg)
    torch.nn.init.constant_(model.proposal_generator.rpn_head.conv.bias, float("nan"))
    losses = validation_loss(cfg, model, cfg.DATASETS.TEST[0])
    assert losses["total_loss"] != losses["total_loss"]
