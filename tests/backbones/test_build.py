"""Names in, models out: the public functions, and what they say to a mistake."""

import pytest
import torch

from backbones import InputError, create_backbone, create_classifier, list_variants
from backbones.layers.position import resize_table
from tests.backbones.helpers import random_images

DEMO = "vil_tiny_1_1_3_1_rpb"


def meta_backbone(name: str, **options):
    with torch.device("meta"):
        return create_backbone(name, **options)


def test_variants_are_listed_sorted_and_by_prefix():
    names = list_variants()
    assert names == sorted(set(names)) and "vil_small_rpb" in names and "full_tiny" in names
    assert list_variants("lit_") == ["lit_b", "lit_b_seg", "lit_m", "lit_m_seg", "lit_s", "lit_s_seg", "lit_ti"]
    assert list_variants("vgg") == []


def test_the_contract_for_a_detector():
    model = meta_backbone("vil_small_rpb", out_features=("stage2", "stage3", "stage4"), drop_path_rate=0.1)
    assert {n: (i.channels, i.stride) for n, i in model.feature_info.items()} == {
        "stage2": (192, 8),
        "stage3": (384, 16),
        "stage4": (768, 32),
    }
    assert model.stages[3].blocks[0].drop_path_rate == pytest.approx(0.1)
    maps = model(torch.empty(1, 3, 800, 1333, device="meta"))
    assert {n: tuple(m.shape) for n, m in maps.items()} == {
        "stage2": (1, 192, 100, 167),
        "stage3": (1, 384, 50, 84),
        "stage4": (1, 768, 25, 42),
    }


def test_weights_are_drawn_as_vil_draws_them():
    torch.manual_seed(0)
    model = create_backbone(DEMO)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert parameter.eq(1).all()
        elif name.endswith("bias") and "patch_embed.projection" not in name:
            assert parameter.eq(0).all()
        elif "patch_embed" not in name and parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
    assert not torch.equal(next(create_backbone(DEMO).parameters()), next(model.parameters()))


def test_a_model_is_made_and_trains():
    torch.manual_seed(0)
    model = create_backbone(DEMO, drop_path_rate=0.1).train()
    maps = model(random_images(2, 3, 45, 70, dtype=torch.float32))
    sum(map_.square().mean() for map_ in maps.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_classifier_is_made_for_its_image_size():
    with torch.device("meta"):
        square = create_classifier("vil_tiny", num_classes=3)
        other = create_classifier("vil_tiny", num_classes=3, img_size=(384, 256))
    assert len(square.backbone.stages[0].positions.rows) == len(square.backbone.stages[0].positions.cols) == 56
    assert [len(stage.positions.rows) for stage in other.backbone.stages] == [96, 48, 24, 12]
    assert [len(stage.positions.cols) for stage in other.backbone.stages] == [64, 32, 16, 8]
    assert other(torch.empty(2, 3, 384, 256, device="meta")).shape == (2, 3)


def test_options_reach_the_attention():
    model = meta_backbone(
        DEMO, window_size=(3, 4, 5, 6), global_tokens=2, attention_mode="cyclic", shared_projections=False
    )
    for stage, window_size in zip(model.stages, (3, 4, 5, 6), strict=True):
        attention = stage.blocks[0].attention
        assert (attention.window_size, attention.mode, attention.shared_projections) == (window_size, "cyclic", False)
        assert stage.global_tokens.shape[1] == 2
    assert meta_backbone(DEMO, attention_backend="reference").stages[0].blocks[0].attention.backend == "reference"
    assert all(stage.activation_checkpointing for stage in meta_backbone(DEMO, activation_checkpointing=True).stages)


def test_positions_are_made_for_the_largest_image():
    assert len(meta_backbone("vil_tiny").stages[0].positions.rows) == 336
    model = meta_backbone("vil_tiny", max_img_size=(800, 1333))
    assert (len(model.stages[0].positions.rows), len(model.stages[0].positions.cols)) == (200, 336)


@pytest.mark.parametrize("create", [create_backbone, create_classifier])
@pytest.mark.parametrize(
    "name, hint",
    [
        ("vil_smal_rpb", "did you mean 'vil_small_rpb'"),
        ("vil-tiny", "did you mean 'vil_tiny'"),
        ("q", "there are: cvt_ls_13, cvt_ls_17"),
    ],
)
def test_an_unknown_name_raises(create, name, hint):
    with pytest.raises(InputError, match=f"unknown variant '{name}'.*{hint}") as caught:
        create(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "create, keyword, hint",
    [
        (create_backbone, "drop_path", "drop_path_rate"),
        (create_backbone, "out_feature", "out_features"),
        (create_backbone, "max_image_size", "max_img_size"),
        (create_classifier, "num_class", "num_classes"),
        (create_classifier, "image_size", "img_size"),
    ],
)
def test_an_unknown_keyword_raises(create, keyword, hint):
    with pytest.raises(InputError, match=f"no keyword '{keyword}'; did you mean '{hint}'"):
        create("vil_tiny", **{keyword: 1})


@pytest.mark.parametrize("name", [DEMO, "vil_tiny"])
@pytest.mark.parametrize(
    "option, message",
    [
        ({"out_features": ("stage22",)}, "unknown feature 'stage22'.*did you mean 'stage2'"),
        ({"attention_mode": "zeropad"}, "unknown attention mode 'zeropad'.*did you mean 'zero_pad'"),
        ({"attention_backend": "spda"}, "unknown attention backend 'spda'.*sdpa"),
        ({"max_img_size": 0}, "max_img_size"),
        ({"max_img_size": (224, 224, 3)}, "max_img_size"),
        ({"max_img_size": 1333.5}, "max_img_size"),
        ({"drop_path_rate": 1.5}, "drop_path_rate"),
        ({"drop_path_rate": -0.1}, "drop_path_rate"),
        ({"window_size": 0}, "window_size"),
        ({"global_tokens": -1}, "global_tokens"),
    ],
    ids=str,
)
def test_a_wrong_value_raises(name, option, message):
    with pytest.raises(InputError, match=message) as caught:
        meta_backbone(name, **option)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vil_tiny_1_1_3_1", "ls_tiny", "lit_ti", "lit_s"])
def test_both_ways_of_resizing_positions_agree_where_the_table_is_made_for_the_image(name):
    """Resized once to the maps of one image size, or to each map: the same for images of that size."""
    height, width = 96, 160
    torch.manual_seed(0)
    each = create_backbone(name, position_resizing="map").eval()
    once = create_backbone(name, position_resizing="load", max_img_size=(height, width)).eval()
    state_dict = each.state_dict()
    for key, tensor in once.state_dict().items():
        table = state_dict[key]
        if table.shape == tensor.shape:
            continue
        if key.endswith("relative_bias.table"):
            stage = int(key.split(".")[1])
            side = int(len(table) ** 0.5)
            grid = (2 * height // (4 << stage) - 1, 2 * width // (4 << stage) - 1)
            mode = "cubic" if name.startswith("lit") else "linear"
            state_dict[key] = resize_table(table.unflatten(0, (side, side)), grid, mode=mode).flatten(0, 1)
        else:
            state_dict[key] = resize_table(table, tuple(tensor.shape[:-1]))
    once.load_state_dict(state_dict)
    images = random_images(1, 3, height, width, dtype=torch.float32)
    with torch.no_grad():
        for stage, expected in each(images).items():
            torch.testing.assert_close(once(images)[stage], expected, atol=1e-4, rtol=1e-4)


def test_an_unknown_way_of_resizing_positions_raises():
    for name in ("vil_tiny", "ls_tiny", "lit_ti"):
        with pytest.raises(InputError, match="unknown position resizing 'pixel'"):
            meta_backbone(name, position_resizing="pixel")


def test_stages_are_dropped_and_tables_are_for_another_size():
    torch.manual_seed(0)
    model = create_backbone("vil_tiny_1_1_3_1", max_img_size=64).eval()
    images = random_images(1, 3, 45, 70, dtype=torch.float32)
    with pytest.raises(InputError, match="does not fit the position table"):
        model(images)
    model.set_img_size((64, 96))
    maps = model(images)
    fresh = create_backbone("vil_tiny_1_1_3_1", max_img_size=(64, 96)).eval()
    fresh.load_state_dict(model.state_dict())
    assert all(torch.equal(m, maps[name]) for name, m in fresh(images).items())
    model.keep_stages(2)
    assert {n: (i.channels, i.stride) for n, i in model.feature_info.items()} == {"stage2": (96, 8)}
    assert torch.equal(model(images)["stage2"], maps["stage2"]) and len(model(images)) == 1
