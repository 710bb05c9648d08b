"""Drawings under names of their own, of what is above the threshold."""

import cv2
import numpy as np

from projects_vil.inference import Detector
from projects_vil.inference.drawings import VideoDrawings
from projects_vil.inference.predict import run
from projects_vil.inference.sources import Video
from tests.projects_vil.inference.helpers import HalfFinder, picture, read, run_on, save, write_video


def test_no_drawing_takes_the_place_of_another(tmp_path):
    names = ["a.bmp", "a.bmp.png", "a.jpg", "a.png", "b.JPG", "below/a.png", "c.tif"]
    for name in names:
        save(tmp_path / "in" / name, picture(40, 60))
    run_on(tmp_path / "in", tmp_path / "out", draw=True, score_threshold=0.3)
    drawings = tmp_path / "out/drawings"
    drawn = {path.relative_to(drawings).as_posix() for path in drawings.rglob("*") if path.is_file()}
    assert drawn == {"a.bmp.png.png", "a.bmp.png", "a.jpg", "a.png", "b.JPG", "below/a.png", "c.tif.png"}


def test_drawings_show_what_is_above_the_threshold(tmp_path):
    save(tmp_path / "a.png", picture(40, 60))
    drawn = []
    for threshold in (0.3, 0.5):
        run_on(tmp_path / "a.png", tmp_path / "out", draw=True, score_threshold=threshold)
        drawn.append(cv2.imread(str(tmp_path / "out/drawings/a.png")).astype(int))
        assert len(read(tmp_path / "out")[0]) == 1
    # The bright half is 200, 100, 0 in RGB; "left 39%" is written over its upper left corner, light on black.
    with_box, without = drawn
    assert with_box.shape == without.shape == (320, 480, 3)
    for drawing in drawn:
        assert np.abs(drawing[250, 100] - [0, 100, 200]).max() < 5
    assert with_box[:20, :60].min(axis=-1).max() > 100 > without[:20, :60].min(axis=-1).max()
    assert (with_box[:, 300:] == without[:, 300:]).all()


def test_video_without_a_codec_is_drawn_as_images(tmp_path, capsys):
    write_video(tmp_path / "clip.avi", 2)
    drawer = VideoDrawings(tmp_path / "drawings", "clip.avi", 8, codec="none")
    run(Video(tmp_path / "clip.avi"), Detector(HalfFinder()), tmp_path, drawer)
    assert sorted(path.name for path in (tmp_path / "drawings/clip").iterdir()) == ["000000.png", "000001.png"]
    assert "frames are drawn as PNG in" in capsys.readouterr().err
