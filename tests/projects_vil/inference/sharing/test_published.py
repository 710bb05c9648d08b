"""The config that is shared."""

import json

import pytest

from backbones import InputError
from projects_vil.config import default_config, load_config
from projects_vil.inference.sharing.published import names_a_place, published_config
from tests.projects_vil.helpers import small_config
from tests.projects_vil.inference.sharing.helpers import PRIVATE


def test_nothing_of_the_machine_is_in_it(tmp_path):
    cfg = small_config("retinanet", *PRIVATE, "OUTPUT_DIR", "/home/me/out", "MODEL.DEVICE", "cuda:3")
    published = published_config(cfg)
    text = published.dump()
    assert "secret" not in text and "/home" not in text and "cuda:3" not in text
    # Names stay, without what they are names of.
    assert tuple(published.DATASETS.TRAIN) == tuple(published.DATASETS.TEST) == ("mine",)
    assert published.DATASETS.COCO == [] and published.LOGGING == default_config().LOGGING
    (tmp_path / "config.yaml").write_text(text)
    again = load_config(tmp_path / "config.yaml")
    for node in ("INPUT", "SOLVER"):
        assert again[node] == cfg[node], node
    again.defrost()
    again.MODEL.WEIGHTS, again.MODEL.DEVICE = cfg.MODEL.WEIGHTS, cfg.MODEL.DEVICE
    # YAML has lists for tuples in lists.
    assert json.dumps(again.MODEL) == json.dumps(cfg.MODEL)
    assert cfg.OUTPUT_DIR == "/home/me/out" and cfg.is_frozen()


def test_another_path_is_named_and_not_left_out():
    cfg = small_config("retinanet", "SOLVER.LR_MULTIPLIERS", '[["/home/me/x", 0.1]]')
    with pytest.raises(
        InputError, match=r"SOLVER.LR_MULTIPLIERS is \[\['/home/me/x', 0.1\]\], a place on this machine"
    ):
        published_config(cfg)


def test_a_key_of_another_project_is_named():
    cfg = small_config().clone()
    cfg.defrost()
    cfg.MODEL.OTHER_HEAD = "x"
    with pytest.raises(InputError, match="the config has MODEL.OTHER_HEAD, which this project does not know"):
        published_config(cfg)


@pytest.mark.parametrize("text", ["/a", "~/a", "~me", "./a", "../a", r"C:\a", r"\\host\a", "s3://a", "x /a", "a=/b"])
def test_what_is_a_place(text):
    assert names_a_place(text) and names_a_place({"a": [1, (text,)]}) and names_a_place({text: 1})


@pytest.mark.parametrize("text", ["", "bbox/AP", "validation_loss/total_loss", "*.offset*", "a.b", "either: or", "1/2"])
def test_what_is_none(text):
    assert not names_a_place(text)
