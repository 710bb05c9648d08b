"""Learning rates that fall towards the images, and what has no layers."""

import pytest
from detectron2.modeling.backbone.vit import get_vit_lr_decay_rate
from torch import nn

from backbones import InputError
from projects_vil.modeling import build_on_meta
from projects_vil.solver import build_optimizer, parameter_groups
from projects_vil.solver.layer_decay import layer_factors
from tests.projects_vil.helpers import small_config

NET = "backbone.bottom_up.net"
RESNET = [
    "MODEL.BACKBONE.NAME",
    "build_retinanet_resnet_fpn_backbone",
    "MODEL.FPN.IN_FEATURES",
    "['res3','res4','res5']",
]
RESNET += ["MODEL.RESNETS.OUT_FEATURES", "['res3','res4','res5']"]


def learning_rates(*overrides: str) -> dict[str, float]:
    cfg = small_config("retinanet", "SOLVER.BASE_LR", "1.0", *overrides)
    model = build_on_meta(cfg)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in build_optimizer(cfg, model).param_groups for p in group["params"]}


def test_rates_by_layer():
    """Of 1-1-3-1 blocks."""
    rates = learning_rates("SOLVER.LAYER_DECAY", "0.5")
    expected = {
        f"{NET}.stages.0.patch_embed.projection.weight": 7,
        f"{NET}.stages.0.blocks.0.mlp.expand.weight": 6,
        f"{NET}.stages.1.patch_embed.projection.weight": 5,
        f"{NET}.stages.2.blocks.0.mlp.expand.weight": 4,
        f"{NET}.stages.2.blocks.2.mlp.expand.bias": 2,
        f"{NET}.stages.3.blocks.0.mlp.expand.weight": 1,
    }
    assert {name: rates[name] for name in expected} == {name: 0.5**power for name, power in expected.items()}
    assert {rate for name, rate in rates.items() if not name.startswith(NET)} == {1.0}
    assert set(learning_rates("SOLVER.LAYER_DECAY", "1.0").values()) == {1.0}


def test_a_flat_model_has_the_rates_of_detectron2():
    """``get_vit_lr_decay_rate``, by which ViTDet trains, of the same blocks in its names."""
    features = ["MODEL.FPN.IN_FEATURES", "['stage1']", "MODEL.RPN.IN_FEATURES", "['p4', 'p5', 'p6']"]
    features += ["MODEL.ROI_HEADS.IN_FEATURES", "['p4', 'p5']", "MODEL.ANCHOR_GENERATOR.SIZES", "[[32, 64, 128]]"]
    cfg = small_config("mask_rcnn", "MODEL.TRANSFORMER.NAME", "evit_full_16_tiny", *features)
    factors = layer_factors(build_on_meta(cfg), 0.7, key="layer_decay")
    assert len(factors) > 100
    for name, factor in factors.items():
        theirs = name.replace(f"{NET}.stages.0.positions", "backbone.net.pos_embed")
        theirs = theirs.replace(f"{NET}.stages.0.global_tokens", "backbone.net.pos_embed")
        theirs = theirs.replace(f"{NET}.stages.0", "backbone.net")
        assert factor == pytest.approx(get_vit_lr_decay_rate(theirs, lr_decay_rate=0.7, num_layers=12)), name


def test_multiplied_with_the_other_factors():
    multipliers = ["SOLVER.LR_MULTIPLIERS", "[['*.stages.0.*', 0.1]]", "SOLVER.BIAS_LR_FACTOR", "3.0"]
    rates = learning_rates("SOLVER.LAYER_DECAY", "0.5", *multipliers)
    assert rates[f"{NET}.stages.0.blocks.0.mlp.expand.weight"] == pytest.approx(0.1 * 0.5**6)
    assert rates[f"{NET}.stages.0.blocks.0.mlp.expand.bias"] == pytest.approx(0.3 * 0.5**6)
    assert rates[f"{NET}.stages.3.blocks.0.mlp.expand.bias"] == pytest.approx(3 * 0.5)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, float("nan"), True, "0.5"])
def test_decays_that_cannot_be(decay):
    reason = f"is {decay!r}: it is above 0 and at most 1.0, at which nothing decays$"
    with pytest.raises(InputError, match=f"^optimizer.params.layer_decay {reason}"):
        parameter_groups(nn.Linear(2, 3), base_lr=1, weight_decay=0, layer_decay=decay)
    if isinstance(decay, float):
        cfg = small_config("retinanet")
        cfg.defrost()
        cfg.SOLVER.LAYER_DECAY = decay
        with pytest.raises(InputError, match=f"^SOLVER.LAYER_DECAY {reason}"):
            build_optimizer(cfg, nn.Linear(2, 3))


def test_a_backbone_that_does_not_know_its_layers():
    assert set(learning_rates(*RESNET).values()) == {1.0}
    with pytest.raises(InputError, match="^SOLVER.LAYER_DECAY is 0.5, and only the backbones of this project know"):
        learning_rates(*RESNET, "SOLVER.LAYER_DECAY", "0.5")
