"""What a checkpoint says of itself, and what becomes of one that says something else."""

import json
import shutil

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer

from backbones import InputError
from projects_vil import load_config
from projects_vil.checkpoint import PROVENANCE_KEY, Checkpointer, Provenance, build_detector, check_weights
from projects_vil.checkpoint.provenance import OFFICIAL_INPUT, InputFormat, differing_options, input_format
from projects_vil.engine import Trainer, check_setup
from tests.projects_vil.checkpoint.test_detection_checkpoint import detector, log_of
from tests.projects_vil.helpers import SMALL, error_line, run_tool, small_config

LOG = "fvcore.common.checkpoint"
BGR = ["INPUT.FORMAT", "BGR", "MODEL.PIXEL_MEAN", "[103.53, 116.28, 123.675]", "MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]"]


def of_run(trained_run, *overrides: str):
    return load_config(trained_run / "config.yaml", ["OVERWRITE_OUTPUT_DIR", "True", *overrides])


def changed(trained_run, folder, **facts) -> str:
    """The run's last file with something else in what it says of itself."""
    contents = torch.load(trained_run / "model_final.pth", weights_only=True)
    contents[PROVENANCE_KEY] |= facts
    torch.save(contents, folder / "changed.pth")
    return str(folder / "changed.pth")


def test_what_every_file_of_a_run_says(trained_run):
    for name in ("model_0000001", "model_final"):
        said = torch.load(trained_run / f"{name}.pth", weights_only=True)[PROVENANCE_KEY]
        assert said["variant"] == "vil_tiny_1_1_3_1_rpb" and said["options"] == {}
        assert said["classes"] == ["circle", "square", "triangle"] and said["category_ids"] == [1, 2, 3]
        assert said["input"] == {
            "format": "RGB", "mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]
        }  # fmt: skip
        assert said["versions"].keys() == {"vil-detectron2", "torch", "detectron2"}
        assert said["versions"]["torch"] == torch.__version__
        assert json.loads(json.dumps(said)) == said


def test_options_are_said_too(tmp_path):
    overrides = ["MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 1, 1, 1]", "MODEL.TRANSFORMER.ATTENTION_MODE", "exact"]
    Checkpointer(detector("retinanet", *overrides), str(tmp_path)).save("saved")
    said = torch.load(tmp_path / "saved.pth", weights_only=True)[PROVENANCE_KEY]
    assert said["options"] == {"global_tokens": [1, 1, 1, 1], "attention_mode": "exact"}
    assert said["classes"] is None and said["category_ids"] is None and said["input"] is None


def test_detectron2_reads_the_file(trained_run):
    model = detector()
    rest = DetectionCheckpointer(model).load(str(trained_run / "model_final.pth"))
    assert rest[PROVENANCE_KEY]["variant"] == "vil_tiny_1_1_3_1_rpb"
    state = torch.load(trained_run / "model_final.pth", weights_only=True)["model"]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())


def test_round_trip_of_what_is_said():
    said = Provenance("lit_s", {"merging": "uniform"}, ("a", "b"), OFFICIAL_INPUT, category_ids=(7, 3))
    assert Provenance.of({PROVENANCE_KEY: json.loads(json.dumps(said.to_dict()))}) == said


@pytest.mark.parametrize(
    "said", [None, 3, [], {}, {"variant": 3, "classes": "ab", "input": 3, "options": 3}, {"input": {"format": "RGB"}}]
)
def test_a_file_may_say_nothing(said):
    assert Provenance.of({PROVENANCE_KEY: said}) == Provenance()
    assert Provenance.of({}) == Provenance()


def without_way_out(caught, run) -> str:
    """What was raised, but for the config that the run left beside its checkpoint, which it names."""
    way_out = f"; its run's own is --config-file {run}/config.yaml"
    assert str(caught.value).endswith(way_out)
    return str(caught.value).removesuffix(way_out)


# -- another variant -------------------------------------------------------------------------------


def test_another_variant_is_refused_with_both_names(trained_run, shapes, tmp_path):
    final = str(trained_run / "model_final.pth")
    expected = f"{final} is of vil_tiny_1_1_3_1_rpb, and the model is vil_tiny_rpb (MODEL.TRANSFORMER.NAME)"
    other = ["MODEL.TRANSFORMER.NAME", "vil_tiny_rpb"]
    for eval_only in (False, True):
        with pytest.raises(InputError) as caught:
            check_setup(of_run(trained_run, *other, "MODEL.WEIGHTS", final), eval_only=eval_only)
        assert without_way_out(caught, trained_run) == expected
    with pytest.raises(InputError) as caught:
        build_detector(of_run(trained_run, *other), final)
    assert without_way_out(caught, trained_run) == expected


def test_variants_are_compared_before_shapes(trained_run, tmp_path):
    """ViL-LS-Tiny and ViL-Tiny share most shapes; a file that says so is refused though all fit."""
    path = changed(trained_run, tmp_path, variant="ls_tiny")
    with pytest.raises(InputError, match="is of ls_tiny, and the model is vil_tiny_1_1_3_1_rpb"):
        check_weights(of_run(trained_run), path)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--resume"], ["--eval-only"]])
def test_the_tool_refuses_another_variant_in_one_line(trained_run, datasets_root, tmp_path, arguments):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained_run / "model_final.pth", run)
    (run / "last_checkpoint").write_text("model_final.pth")
    overrides = ["OUTPUT_DIR", run, "MODEL.TRANSFORMER.NAME", "vil_tiny_rpb", "MODEL.WEIGHTS", run / "model_final.pth"]
    config = trained_run / "config.yaml"
    result = run_tool("train_net.py", "--config-file", config, *arguments, *overrides, datasets_root=datasets_root)
    assert "is of vil_tiny_1_1_3_1_rpb, and the model is vil_tiny_rpb" in error_line(result)
    assert {path.name for path in run.iterdir()} == {"model_final.pth", "last_checkpoint"}


def test_an_interrupted_save_is_refused_before_resuming(trained_run, shapes, tmp_path):
    content = (trained_run / "model_final.pth").read_bytes()
    (tmp_path / "model_final.pth").write_bytes(content[: len(content) // 2])
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    with pytest.raises(InputError, match="none of the 1 checkpoints .* can be resumed"):
        check_setup(of_run(trained_run, "OUTPUT_DIR", str(tmp_path)), resume=True)


# -- other options ---------------------------------------------------------------------------------


OPTION = "MODEL.TRANSFORMER."


@pytest.mark.parametrize(
    "key, value, own",
    [("ATTENTION_MODE", "exact", "zero_pad"), ("GLOBAL_TOKENS", "[2, 1, 1, 0]", "[1, 1, 1, 0]")],
)
def test_other_options_warn_at_the_start_and_are_refused_where_all_must_fit(trained_run, key, value, own):
    final, overrides = str(trained_run / "model_final.pth"), [f"{OPTION}{key}", value]
    cfg = of_run(trained_run, *overrides)
    expected = f"{final} has {OPTION}{key} {own} where the model has {value}"
    for complete in (lambda: check_weights(cfg, final, complete=True), lambda: build_detector(cfg, final)):
        with pytest.raises(InputError) as caught:
            complete()
        assert without_way_out(caught, trained_run) == expected
    if key == "ATTENTION_MODE":
        with log_of(LOG) as log:
            Checkpointer(detector("retinanet", *overrides), cfg=cfg).load(final)
        assert f"{expected}: what it learned was for that" in log


def test_resuming_with_other_options_is_refused(trained_run, shapes, tmp_path):
    shutil.copy(trained_run / "model_final.pth", tmp_path)
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    cfg = of_run(trained_run, "OUTPUT_DIR", str(tmp_path), f"{OPTION}ATTENTION_MODE", "cyclic")
    expected = "has MODEL.TRANSFORMER.ATTENTION_MODE zero_pad where the model has cyclic"
    with pytest.raises(InputError, match=expected):
        check_setup(cfg, resume=True)
    with pytest.raises(InputError, match=expected):
        Trainer(cfg).resume_or_load(resume=True)


def test_the_variants_own_options_may_be_given_or_not(trained_run, tmp_path):
    given = [f"{OPTION}ATTENTION_MODE", "zero_pad", f"{OPTION}GLOBAL_TOKENS", "[1, 1, 1, 0]"]
    given += [f"{OPTION}WINDOW_SIZE", "[7, 7, 7, 7]", f"{OPTION}SHARED_PROJECTIONS", "True"]
    with log_of(LOG) as log:
        Checkpointer(detector("retinanet", *given), cfg=of_run(trained_run, *given)).load(
            str(trained_run / "model_final.pth")
        )
    assert not any("where the model has" in text for text in log)
    check_weights(of_run(trained_run, *given), str(trained_run / "model_final.pth"), complete=True)
    said = {"attention_mode": "zero_pad", "global_tokens": [1, 1, 1, 0], "window_size": 7, "attention": None}
    check_weights(of_run(trained_run), changed(trained_run, tmp_path, options=said), complete=True)


def test_a_file_with_other_names_and_options_says_which_options(trained_run):
    cfg = of_run(trained_run, f"{OPTION}GLOBAL_TOKENS", "[0, 0, 0, 0]")
    expected = "; it has MODEL.TRANSFORMER.GLOBAL_TOKENS [1, 1, 1, 0] where the model has [0, 0, 0, 0]"
    with pytest.raises(InputError, match="names in it fit nothing") as caught:
        check_weights(cfg, str(trained_run / "model_final.pth"))
    assert without_way_out(caught, trained_run).endswith(expected)
    cfg = of_run(trained_run, f"{OPTION}WINDOW_SIZE", "[8, 7, 7, 7]")
    with pytest.raises(InputError, match=r"shapes differ.*WINDOW_SIZE \[7, 7, 7, 7\] where the model has \[8"):
        check_weights(cfg, str(trained_run / "model_final.pth"))


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"window_size": "wide"}, {"attention": [3]}, None, 3])
def test_options_that_cannot_be_are_not_compared(trained_run, tmp_path, options):
    check_weights(of_run(trained_run), changed(trained_run, tmp_path, options=options), complete=True)


def test_what_differs():
    assert differing_options("vil_tiny", {}, {"position_resizing": "load"}) == {}
    key = f"{OPTION}POSITION_RESIZING"
    assert differing_options("vil_tiny", {"position_resizing": "map"}, {}) == {key: ("map", "load")}
    assert differing_options("ls_tiny", {"position_resizing": "load"}, {}) == {key: ("load", "map")}
    # Tables of windows are not resized, and all kinds of BatchNorm evaluate alike.
    assert differing_options("vil_tiny_rpb", {"position_resizing": "load"}, {}) == {}
    assert differing_options("lit_s", {"batch_norm": "frozen"}, {}) == {}
    assert differing_options("lit_s", {"merging": "uniform"}, {}) == {f"{OPTION}MERGING": ("uniform", "deformable")}
    assert differing_options("cvt_ls_13", {"rank": 16}, {}).keys() == {f"{OPTION}RANK"}


# -- another input ---------------------------------------------------------------------------------


def test_input_formats():
    ours = input_format(small_config())
    assert ours == OFFICIAL_INPUT and ours.matches(InputFormat("RGB", (123.68, 116.28, 103.53), ours.std))
    assert not ours.matches(InputFormat("BGR", ours.mean, ours.std))
    assert not ours.matches(InputFormat("RGB", ours.mean[::-1], ours.std))
    assert not ours.matches(InputFormat("RGB", ours.mean, (1.0, 1.0, 1.0)))
    assert not ours.matches(InputFormat("RGB", ours.mean[:1], ours.std[:1]))


def test_another_input_warns_at_the_start_and_is_refused_where_all_must_fit(trained_run):
    final = str(trained_run / "model_final.pth")
    cfg = of_run(trained_run, *BGR)
    expected = (
        f"{final} was trained on RGB with mean [123.675, 116.28, 103.53] and std [58.395, 57.12, 57.375], and the "
        "config has BGR with mean [103.53, 116.28, 123.675] and std [1, 1, 1] (INPUT.FORMAT, MODEL.PIXEL_MEAN, "
        "MODEL.PIXEL_STD)"
    )
    with log_of(LOG) as log:
        Checkpointer(detector("retinanet", *BGR), cfg=cfg).load(final)
    assert expected in log
    for complete in (lambda: check_weights(cfg, final, complete=True), lambda: build_detector(cfg, final)):
        with pytest.raises(InputError) as caught:
            complete()
        assert without_way_out(caught, trained_run) == expected


# -- files from before, and files that are ours ----------------------------------------------------


def test_a_file_that_says_nothing_still_loads(trained_run, shapes, tmp_path):
    contents = torch.load(trained_run / "model_final.pth", weights_only=True)
    del contents[PROVENANCE_KEY]
    path = str(tmp_path / "model_0000003.pth")
    torch.save(contents, path)
    for eval_only in (False, True):
        check_setup(of_run(trained_run, "MODEL.WEIGHTS", path), eval_only=eval_only)
    old = build_detector(of_run(trained_run), path).state_dict()
    new = build_detector(of_run(trained_run), trained_run / "model_final.pth").state_dict()
    assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())

    (tmp_path / "last_checkpoint").write_text("model_0000003.pth")
    cfg = of_run(trained_run, "OUTPUT_DIR", str(tmp_path), "SOLVER.MAX_ITER", "5", "DATASETS.TEST", "()")
    check_setup(cfg, resume=True)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 4


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn", "semantic_fpn"])
def test_round_trip_gives_identical_outputs(tmp_path, name):
    cfg = small_config(name)
    saved = detector(name, seed=7).eval()
    Checkpointer(saved, str(tmp_path), cfg=cfg).save("saved")
    loaded = build_detector(cfg, tmp_path / "saved.pth")
    batch = [{"image": torch.rand(3, 70, 90, generator=torch.Generator().manual_seed(0)) * 255}]
    with torch.inference_mode():
        expected, outputs = saved(batch)[0], loaded(batch)[0]
    if name == "semantic_fpn":
        assert torch.equal(outputs["sem_seg"], expected["sem_seg"])
        return
    ours, theirs = outputs["instances"].get_fields(), expected["instances"].get_fields()
    assert len(expected["instances"]) and ours.keys() == theirs.keys()
    for field, value in ours.items():
        assert torch.equal(getattr(value, "tensor", value), getattr(theirs[field], "tensor", theirs[field])), field


def test_resuming_with_other_classes_is_refused(trained_run, shapes, tmp_path):
    changed(trained_run, tmp_path, classes=["circle", "triangle", "square"])
    (tmp_path / "last_checkpoint").write_text("changed.pth")
    trainer = Trainer(of_run(trained_run, "OUTPUT_DIR", str(tmp_path)))
    with pytest.raises(InputError, match="it cannot be resumed, but MODEL.WEIGHTS may start from it"):
        trainer.resume_or_load(resume=True)


def test_a_run_on_the_same_shapes_as_a_new_start(trained_run, shapes, tmp_path):
    """A finished run as MODEL.WEIGHTS: the weights and nothing of its progress."""
    overrides = [*SMALL["retinanet"], "OUTPUT_DIR", str(tmp_path)]
    cfg = of_run(trained_run, *overrides, "MODEL.WEIGHTS", str(trained_run / "model_final.pth"))
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    assert trainer.start_iter == 0
    state = torch.load(trained_run / "model_final.pth", weights_only=True)["model"]
    assert all(torch.equal(tensor, trainer.model.state_dict()[name]) for name, tensor in state.items())
