"""``MODEL.WEIGHTS`` names a file of an official project: what a detector becomes of it, and what is refused."""

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from safetensors.torch import save_file
from torch import nn

from backbones import InputError
from backbones.convert import convert_state_dict
from backbones.variants import VARIANTS
from projects_vil.checkpoint import PROVENANCE_KEY, Checkpointer, check_weights
from projects_vil.engine import check_setup
from tests import wrapping
from tests.backbones import official, official_lit
from tests.backbones.helpers import random_images
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.projects_vil.checkpoint.test_detection_checkpoint import Malicious, detector, log_of
from tests.projects_vil.helpers import error_line, run_tool, small_config
from tests.selection import slow_except

BOTTOM_UP = "backbone.bottom_up.net."
LOG = "fvcore.common.checkpoint"
ABSOLUTE = ["MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1"]
AS_PRETRAINED = ["MODEL.TRANSFORMER.MAX_IMG_SIZE", "224"]  # tables stay as they are
LIT = {"lit_absolute": official_lit.TI, "lit_relative": official_lit.S}


@pytest.fixture(autouse=True)
def small_variants(monkeypatch):
    for name, variant in LIT.items():
        monkeypatch.setitem(VARIANTS, name, variant)


def weights_of(name: str, *, classifier: bool = True) -> dict[str, torch.Tensor]:
    """An official checkpoint in float32, as those that were released."""
    if name in LIT:
        state = official_lit.official_state_dict(LIT[name], classifier=classifier)
    else:
        state = official.official_state_dict(relative_bias=name.endswith("_rpb"))
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}


def as_saved(state: dict[str, torch.Tensor], how: str, heads: dict[str, torch.Tensor] | None = None) -> dict:
    """Wrapped as an official repository saves it."""
    if how == "VisionLongformerForObjectDetection":
        state = {name: tensor for name, tensor in state.items() if not name.startswith(("norm.", "head."))}
        return wrapping.detectron2_detector(state, heads)
    if how == "LIT mmdetection":
        return wrapping.mmdetection(state, heads)
    if how == "LIT mmsegmentation":
        return wrapping.mmsegmentation(state)
    return {"vision-longformer": wrapping.vision_longformer, "LIT": wrapping.lit_classifier}[how](state)


def save(folder, content: dict, name: str = "official.pth") -> str:
    torch.save(content, folder / name)
    return str(folder / name)


def load(path: str, *overrides: str, name: str = "retinanet") -> nn.Module:
    model = detector(name, *overrides).eval()
    Checkpointer(model, cfg=small_config(name, *overrides)).load(path)
    return model


def assert_maps_equal(maps: dict, expected: dict) -> None:
    assert maps and maps.keys() <= expected.keys()
    for stage, output in maps.items():
        largest = expected[stage].abs().max()
        assert (output - expected[stage]).abs().max() <= 2e-4 * largest, stage


# -- what a detector computes with them ------------------------------------------------------------


@pytest.mark.parametrize("how", ["vision-longformer", "VisionLongformerForObjectDetection"])
@pytest.mark.parametrize("overrides", [[], ABSOLUTE], ids=["relative", "absolute"])
def test_vil_in_a_detector_gives_the_official_maps(tmp_path, how, overrides):
    name = overrides[-1] if overrides else "vil_tiny_1_1_3_1_rpb"
    weights = weights_of(name)
    overrides = [*overrides, "MODEL.TRANSFORMER.MAX_IMG_SIZE", "224"]  # as the tables are: nothing is resized
    model = load(save(tmp_path, as_saved(weights, how)), *overrides)
    images = random_images(2, 3, 37, 54, dtype=torch.float32)
    with torch.inference_mode():
        maps = model.backbone.bottom_up(images)
    assert_maps_equal(maps, official.official_forward(weights, images)[0])


@pytest.mark.parametrize("name", LIT)
@pytest.mark.parametrize("how", ["LIT", "LIT mmdetection"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_lit_in_a_detector_gives_the_official_maps(tmp_path, name, how, suffix):
    weights = weights_of(name, classifier=how == "LIT")
    path = save(tmp_path, as_saved(weights, how))
    if suffix == "safetensors":
        # Nobody publishes these; a user may have made one of the state dict.
        path = str(tmp_path / "official.safetensors")
        save_file({("backbone." if how != "LIT" else "") + key: t for key, t in weights.items()}, path)
    model = load(path, "MODEL.TRANSFORMER.NAME", name)
    images = random_images(1, 3, 96, 64, dtype=torch.float32)
    # A detector has no global token, which only a classifier of LIT-Ti has.
    double = {key: t.double() for key, t in weights.items() if not key.startswith(("head.", "norm.", "cls_token"))}
    expected, _ = official_lit.official_forward(double, images.double(), LIT[name])
    with torch.inference_mode():
        maps = model.backbone.bottom_up(images)
    if name == "lit_relative" and how == "LIT":
        # The classifier lacks the norms of a detector's maps: they start as ones and zeros.
        for stage, output in expected.items():
            if stage != "stage1":
                expected[stage] = nn.functional.layer_norm(output.permute(0, 2, 3, 1), output.shape[1:2])
                expected[stage] = expected[stage].permute(0, 3, 1, 2)
    assert_maps_equal(maps, expected)


# Not here: the LIT classifiers, whose files have no maps, and Linformer, which is no backbone.
GOLDEN_FILES = [
    ("vil_tiny_ape_cls", "vision-longformer", ["MODEL.TRANSFORMER.NAME", "vil_tiny", *AS_PRETRAINED]),
    ("global_tiny_ape_cls", "vision-longformer", ["MODEL.TRANSFORMER.NAME", "global_tiny", *AS_PRETRAINED]),
    ("srformer64_tiny_ape_cls", "vision-longformer", ["MODEL.TRANSFORMER.NAME", "sra64_tiny", *AS_PRETRAINED]),
    ("performer_tiny_ape_cls", "vision-longformer", ["MODEL.TRANSFORMER.NAME", "performer_tiny", *AS_PRETRAINED]),
    ("vil_tiny_rpb_det", "VisionLongformerForObjectDetection", ["MODEL.TRANSFORMER.NAME", "vil_tiny_rpb"]),
    (
        "vil_small_rpb_g1_det",
        "VisionLongformerForObjectDetection",
        ["MODEL.TRANSFORMER.NAME", "vil_small_rpb", "MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 1, 1, 1]"],
    ),
    ("vil_small_rpb_cls", "vision-longformer", ["MODEL.TRANSFORMER.NAME", "vil_small_rpb"]),
    ("vil_small_ape_det", "VisionLongformerForObjectDetection", ["MODEL.TRANSFORMER.NAME", "vil_small"]),
    ("ls_medium_224_cls", "vision-longformer", ["MODEL.TRANSFORMER.NAME", "ls_medium"]),
    ("lit_s_det", "LIT mmdetection", ["MODEL.TRANSFORMER.NAME", "lit_s"]),
    ("lit_ti_det", "LIT mmdetection", ["MODEL.TRANSFORMER.NAME", "lit_ti"]),
    ("lit_s_seg", "LIT mmsegmentation", ["MODEL.TRANSFORMER.NAME", "lit_s_seg"]),
]


@pytest.mark.parametrize("file, how, overrides", slow_except(GOLDEN_FILES, ["vil_tiny_rpb_det"]))
def test_golden_file_in_a_detector(tmp_path, file, how, overrides):
    reference = golden(file)
    model = load(save(tmp_path, as_saved(golden_state_dict(reference), how)), *overrides, name="mask_rcnn")
    with torch.inference_mode():
        maps = model.backbone.bottom_up(golden_images(reference))
    assert maps.keys() == reference["stages"].keys()
    for stage, expected in reference["stages"].items():
        assert_close_to_golden(maps[stage], expected)


# -- tables at another size ------------------------------------------------------------------------


def interpolated(table: np.ndarray, size: int) -> np.ndarray:
    """(length, C) at the half-pixel centres of ``size`` places, ends held."""
    length = len(table)
    places = (np.arange(size) + 0.5) * length / size - 0.5
    return np.stack([np.interp(places, np.arange(length), column) for column in table.T], axis=1)


@pytest.mark.parametrize("generated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_absolute_positions_of_224_in_a_detector_at_1333(tmp_path, generated):
    if generated:
        weights, name = weights_of("vil_tiny_1_1_3_1"), "vil_tiny_1_1_3_1"
    else:
        # The detector's file with tables for 224 pixels: there is no golden classifier of vil_small.
        weights, name = golden_state_dict(golden("vil_small_ape_det")), "vil_small"
        for stage, side in enumerate((56, 28, 14, 7), start=1):
            for axis in "xy":
                key = f"layer{stage}.0.{axis}_pos_embed"
                weights[key] = weights[key][:, :side].contiguous()
    with log_of(LOG) as log:
        model = load(save(tmp_path, as_saved(weights, "vision-longformer")), "MODEL.TRANSFORMER.NAME", name)
    state = model.state_dict()
    for stage, length in enumerate((336, 168, 84, 42)):
        for ours, theirs in (("rows", "x"), ("cols", "y")):
            table = weights[f"layer{stage + 1}.0.{theirs}_pos_embed"][0].double().numpy()
            expected = torch.from_numpy(interpolated(table, length))
            loaded = state[f"{BOTTOM_UP}stages.{stage}.positions.{ours}"]
            torch.testing.assert_close(loaded.double(), expected, atol=1e-5, rtol=1e-5)
    assert sum(text.startswith("resized: stages.") for text in log) == 8
    assert any("stages.0.positions.rows (56, " in text and "to (336, " in text for text in log)
    with torch.inference_mode():
        assert model.backbone.bottom_up(torch.zeros(1, 3, 800, 1333))["stage4"].shape[2:] == (25, 42)


@pytest.mark.parametrize("generated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_relative_bias_of_224_in_a_detector_at_1333(tmp_path, generated):
    """A window's table does not depend on the image; another window's is resized."""
    if generated:
        weights, name = weights_of("vil_tiny_1_1_3_1_rpb"), "vil_tiny_1_1_3_1_rpb"
    else:
        weights, name = golden_state_dict(golden("vil_small_rpb_cls")), "vil_small_rpb"
    path = save(tmp_path, as_saved(weights, "vision-longformer"))
    source = "layer3.3.attn.local_relative_position_bias_table"
    target = f"{BOTTOM_UP}stages.2.blocks.1.attention.relative_bias.table"
    with log_of(LOG) as log:
        model = load(path, "MODEL.TRANSFORMER.NAME", name)
    assert torch.equal(model.state_dict()[target], weights[source])
    assert not any(text.startswith("resized") for text in log)
    with torch.inference_mode():
        assert model.backbone.bottom_up(torch.zeros(1, 3, 800, 1333))["stage4"].shape[2:] == (25, 42)

    wider = load(path, "MODEL.TRANSFORMER.NAME", name, "MODEL.TRANSFORMER.WINDOW_SIZE", "[8, 8, 8, 8]")
    grid = weights[source].double().unflatten(0, (27, 27)).numpy()
    rows = np.stack([interpolated(grid[:, col], 31) for col in range(27)], axis=1)
    both = np.stack([interpolated(rows[row], 31) for row in range(31)])
    expected = torch.from_numpy(both).flatten(0, 1)
    torch.testing.assert_close(wider.state_dict()[target].double(), expected, atol=1e-5, rtol=1e-5)


# -- what the log says, and heads ------------------------------------------------------------------


def test_the_report_is_logged(tmp_path):
    weights = weights_of("vil_tiny_1_1_3_1_rpb")
    _, report = convert_state_dict(weights, "vil_tiny_1_1_3_1_rpb")
    path = save(tmp_path, as_saved(weights, "vision-longformer"))
    with log_of(LOG) as log:
        load(path)
    assert f"vision-longformer: {report.summary()}" in "\n".join(log)
    assert any(text.startswith("dropped: ") and "the classification head" in text for text in log)


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_an_official_vil_detector_fills_the_whole_model(tmp_path, name):
    classes = ["MODEL.RETINANET.NUM_CLASSES", "80", "MODEL.ROI_HEADS.NUM_CLASSES", "80"]
    cfg = full_config(name, *classes)
    torch.manual_seed(7)
    trained = build_model(cfg).state_dict()
    heads = {key: tensor for key, tensor in trained.items() if not key.startswith("backbone.bottom_up.")}
    anchors = "anchor_generator.cell_anchors.0" if name == "retinanet" else None
    extra = {anchors: torch.zeros(9, 4)} if anchors else {}
    extra["pixel_mean"] = torch.zeros(3, 1, 1)
    kind = "VisionLongformerForObjectDetection"
    path = save(tmp_path, as_saved(weights_of("vil_tiny_1_1_3_1_rpb"), kind, heads | extra))
    check_weights(cfg, path, complete=True)
    torch.manual_seed(0)
    model = build_model(cfg)
    Checkpointer(model, cfg=cfg, complete=True).load(path)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in heads.items())


def full_config(name: str, *overrides: str):
    """With heads as deep as those of the official detectors."""
    deep = ["MODEL.RETINANET.NUM_CONVS", "4"] if name == "retinanet" else ["MODEL.ROI_MASK_HEAD.NUM_CONV", "4"]
    return small_config(name, *deep, *overrides)


def test_heads_of_mmdetection_are_dropped_with_a_reason(tmp_path):
    heads = {"neck.lateral_convs.0.conv.weight": torch.ones(2), "bbox_head.retina_cls.weight": torch.ones(3)}
    heads["bbox_head.retina_cls.bias"] = torch.ones(3)
    path = save(tmp_path, as_saved(weights_of("lit_relative", classifier=False), "LIT mmdetection", heads))
    with log_of(LOG) as log:
        load(path, "MODEL.TRANSFORMER.NAME", "lit_relative")
    dropped = [text for text in log if text.startswith("dropped: ")]
    assert any("neck.lateral_convs.0.conv.weight: neck is mmdetection's" in text for text in dropped)
    assert any("bbox_head.retina_cls.weight and 1 more: bbox_head is mmdetection's" in text for text in dropped)


def test_an_official_classifier_is_no_trained_detector(tmp_path):
    path = save(tmp_path, as_saved(weights_of("vil_tiny_1_1_3_1_rpb"), "vision-longformer"))
    with pytest.raises(InputError, match="parameters of the model are not in it, such as "):
        check_weights(small_config(), path, complete=True)


def test_official_files_are_for_rgb(tmp_path):
    path = save(tmp_path, as_saved(weights_of("vil_tiny_1_1_3_1_rpb"), "vision-longformer"))
    with log_of(LOG) as log:
        load(path)
        assert not any("was trained on" in text for text in log)
        load(path, "INPUT.FORMAT", "BGR")
    assert any("was trained on RGB with mean" in text and "config has BGR" in text for text in log)


def test_an_official_file_that_is_loaded_is_saved_as_ours(tmp_path):
    cfg = small_config()
    model = load(save(tmp_path, as_saved(weights_of("vil_tiny_1_1_3_1_rpb"), "vision-longformer")))
    Checkpointer(model, str(tmp_path), cfg=cfg).save("ours")
    contents = torch.load(tmp_path / "ours.pth", weights_only=True)
    assert contents[PROVENANCE_KEY]["variant"] == "vil_tiny_1_1_3_1_rpb"
    again = detector(seed=3)
    Checkpointer(again, cfg=cfg, complete=True).load(str(tmp_path / "ours.pth"))
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())


# -- what is refused, before training --------------------------------------------------------------


def refusal(path: str, *overrides: str) -> str:
    """What ``tools/train_net.py`` says before it starts."""
    with pytest.raises(InputError) as caught:
        check_setup(small_config("retinanet", *overrides, "MODEL.WEIGHTS", str(path)))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "how", slow_except(["vision-longformer", "VisionLongformerForObjectDetection"], ["vision-longformer"])
)
def test_damaged_official_files(shapes, tmp_path, how):
    weights = weights_of("vil_tiny_1_1_3_1_rpb")
    check_setup(small_config("retinanet", "MODEL.WEIGHTS", save(tmp_path, as_saved(weights, how), "right.pth")))

    key, other = "layer2.1.attn.query.weight", "layer2.1.attn.qeury.weight"
    renamed = {other if name == key else name: tensor for name, tensor in weights.items()}
    text = refusal(save(tmp_path, as_saved(renamed, how)))
    assert f"no rule explains {other}; nothing fills stages.1.blocks.0.attention.query.weight" in text

    extra = weights | {"layer2.1.attn.temperature": torch.ones(1)}
    text = refusal(save(tmp_path, as_saved(extra, how)))
    assert "no rule explains layer2.1.attn.temperature" in text and "nothing fills" not in text

    half = dict(list(weights.items())[: len(weights) // 2])
    text = refusal(save(tmp_path, as_saved(half, how)))
    assert "nothing fills" in text and "more" in text

    path = save(tmp_path, as_saved(weights, how))
    content = (tmp_path / "official.pth").read_bytes()
    (tmp_path / "official.pth").write_bytes(content[: len(content) // 2])
    assert "is no checkpoint" in refusal(path)


def test_official_files_of_another_variant(shapes, tmp_path):
    path = save(tmp_path, as_saved(weights_of("vil_tiny_1_1_3_1_rpb"), "vision-longformer"))
    assert "vision-longformer" in refusal(path, *ABSOLUTE)
    assert "vil_small_rpb" in refusal(path, "MODEL.TRANSFORMER.NAME", "vil_small_rpb")
    assert "lit_s" in refusal(path, "MODEL.TRANSFORMER.NAME", "lit_s")
    cvt = ["MODEL.TRANSFORMER.NAME", "cvt_ls_13", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']"]
    assert "no official weights of cvt_ls_13" in refusal(path, *cvt)


@pytest.mark.parametrize(
    "how", slow_except(["vision-longformer", "VisionLongformerForObjectDetection"], ["vision-longformer"])
)
def test_separate_projections_and_other_global_tokens_name_their_keys(shapes, tmp_path, how):
    weights = weights_of("vil_tiny_1_1_3_1_rpb")
    separate = {name: tensor + 1 if "_global." in name else tensor for name, tensor in weights.items()}
    path = save(tmp_path, as_saved(separate, how))
    text = refusal(path)
    assert text.endswith("; it is to be loaded with MODEL.TRANSFORMER.SHARED_PROJECTIONS False")
    load(path, "MODEL.TRANSFORMER.SHARED_PROJECTIONS", "False")

    path = save(tmp_path, as_saved(weights, how))
    text = refusal(path, "MODEL.TRANSFORMER.GLOBAL_TOKENS", "[0, 0, 0, 0]")
    assert text.endswith("; it is to be loaded with MODEL.TRANSFORMER.GLOBAL_TOKENS '[1, 1, 1, 0]'")
    load(path, "MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 1, 1, 0]")

    more = dict(weights)
    more["layer1.0.cls_token"] = torch.ones(1, 2, 48)
    for name in weights:
        if name.startswith("layer1.") and "g2g_relative" in name:
            more[name] = torch.ones(weights[name].shape[0], 2, 2)
        if name.startswith("layer1.") and "g2l_relative" in name:
            more[name] = torch.ones(2, weights[name].shape[1], 2)
    text = refusal(save(tmp_path, as_saved(more, how)))
    assert text.endswith("; it is to be loaded with MODEL.TRANSFORMER.GLOBAL_TOKENS '[2, 1, 1, 0]'")


@pytest.mark.slow
def test_the_golden_file_with_a_global_token_more_names_the_key(shapes, tmp_path):
    weights = golden_state_dict(golden("vil_small_rpb_g1_det"))
    text = refusal(
        save(tmp_path, as_saved(weights, "VisionLongformerForObjectDetection")),
        *("MODEL.TRANSFORMER.NAME", "vil_small_rpb"),
    )
    assert text.endswith("; it is to be loaded with MODEL.TRANSFORMER.GLOBAL_TOKENS '[1, 1, 1, 1]'")


def test_an_official_file_into_a_model_with_options_is_not_compared(tmp_path):
    """It says none of its own: what does not show in names and shapes is the user's choice."""
    path = save(tmp_path, as_saved(weights_of("vil_tiny_1_1_3_1_rpb"), "vision-longformer"))
    with log_of(LOG) as log:
        load(path, "MODEL.TRANSFORMER.ATTENTION_MODE", "exact")
    assert not any("where the model has" in text for text in log)


def test_a_file_of_other_code(shapes, tmp_path):
    resnet = {"conv1.weight": torch.ones(2), "layer1.0.conv1.weight": torch.ones(2)}
    for wrapper in ("net", "state_dict"):
        text = refusal(save(tmp_path, {wrapper: resnet}))
        assert text.endswith("is neither a detectron2 checkpoint nor an official one, nor a classifier's")
    assert "names in it fit nothing" in refusal(save(tmp_path, {"model": resnet}))


def test_an_extra_head_of_an_official_detector(shapes, tmp_path):
    kind = "VisionLongformerForObjectDetection"
    heads = {"keypoint_head.weight": torch.ones(2)}
    assert "keypoint_head.weight" in refusal(save(tmp_path, as_saved(weights_of("vil_tiny_1_1_3_1_rpb"), kind, heads)))


@pytest.mark.slow
@pytest.mark.parametrize("content", ["malicious", "text"])
def test_the_tool_refuses_it_in_one_line(datasets_root, tmp_path, content):
    path, executed = tmp_path / "official.pth", tmp_path / "executed"
    if content == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    else:
        torch.save({"net": weights_of("vil_tiny_1_1_3_1_rpb"), "args": Malicious(executed)}, path)
    config = "configs/demo/retinanet_vil_shapes.yaml"
    overrides = ["MODEL.WEIGHTS", path, "OUTPUT_DIR", tmp_path / "output"]
    line = error_line(run_tool("train_net.py", "--config-file", config, *overrides, datasets_root=datasets_root))
    assert str(path) in line and not executed.exists()
    assert not (tmp_path / "output").exists()
