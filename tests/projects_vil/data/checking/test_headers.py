"""The quick look at a JPEG file agrees with Pillow, or leaves the file to it."""

import io

import pytest
from PIL import Image

from projects_vil.data import read_size
from projects_vil.data.checking.headers import plain_jpeg_size, sizes_of_files

KINDS = {
    "plain": {},
    "progressive": {"progressive": True},
    "with its resolution": {"dpi": (300, 300)},
    "with a comment": {"comment": b"a comment"},
    "coarse": {"quality": 10, "subsampling": 2},
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", KINDS)
def test_size_of_a_plain_jpeg(tmp_path, kind, mode):
    Image.new(mode, (61, 43)).save(tmp_path / "a.jpg", **KINDS[kind])
    assert plain_jpeg_size(str(tmp_path / "a.jpg")) == read_size(tmp_path / "a.jpg") == (43, 61)


@pytest.mark.parametrize("kind", ["exif", "cmyk", "png", "profile", "cut", "empty", "text", "long comment"])
def test_the_rest_is_left_to_pillow(tmp_path, kind):
    file, image, exif = io.BytesIO(), Image.new("CMYK" if kind == "cmyk" else "RGB", (61, 43)), Image.Exif()
    exif[0x0112] = 6
    options = {"exif": {"exif": exif}, "profile": {"icc_profile": bytes(6000)}}
    options["long comment"] = {"comment": bytes(6000)}
    image.save(file, "PNG" if kind == "png" else "JPEG", **options.get(kind, {}))
    content = {"cut": file.getvalue()[:40], "empty": b"", "text": b"no image"}.get(kind, file.getvalue())
    (tmp_path / "a.jpg").write_bytes(content)
    assert plain_jpeg_size(str(tmp_path / "a.jpg")) is None
    (size,) = sizes_of_files([str(tmp_path / "a.jpg")])
    assert size == ((61, 43) if kind == "exif" else (43, 61)) or (kind in ("cut", "empty", "text") and size)
