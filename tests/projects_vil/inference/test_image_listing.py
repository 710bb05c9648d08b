"""find_images: all types of inputs, shards, and damaged files."""

import csv
import gzip
import itertools
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from projects_vil.data.image_files import UnreadableImage
from projects_vil.inference import image_listing
from projects_vil.inference.image_listing import (
    archives_of_shard,
    find_images,
    list_paths,
    number_of_images,
    split_listed,
)
from tests.projects_vil.helpers import message
from tests.projects_vil.inference.helpers import picture, save

HEIGHTS = {"a.b/z.png": 30, "a.png": 40, "a/x.jpg": 50, "b.bmp": 60}  # sorted by name


@pytest.fixture
def photos(tmp_path):
    """A folder of photos, and a list, a table and tar files of the same photos."""
    for name, height in HEIGHTS.items():
        save(tmp_path / "in" / name, picture(height, 60))
    save(tmp_path / "in/out/c.png", picture(20, 60))
    for name in (".hidden.png", "notes.txt"):
        (tmp_path / "in" / name).write_text("not an image")
    paths = [f"in/{name}" for name in HEIGHTS]
    (tmp_path / "list.txt").write_text("\n\n".join(paths))
    with (tmp_path / "table.csv").open("w") as file:
        csv.writer(file).writerows([["number", "url"], *enumerate(paths)])
    for number, names in enumerate((list(HEIGHTS)[:2], list(HEIGHTS)[2:])):
        # With a global header, as in archives written by git.
        with tarfile.open(tmp_path / f"shard-{number + 8:02}.tar", "w", pax_headers={"comment": "photos"}) as tar:
            for name in names:
                tar.add(tmp_path / "in" / name, name)
                tar.add(tmp_path / "list.txt", f"{name}.txt")
    return tmp_path


def found(source, **options) -> dict[str, int]:
    """Return the names and heights of the images."""
    images = {}
    for image in find_images(source, exclude=Path(source).parent / "in/out", **options):
        pixels = image.decode()[0]
        assert pixels.shape[:2] == image.read_size() and np.ptp(pixels) > 100
        images[image.name] = len(pixels)
    return images


@pytest.mark.parametrize("kind", ["in", "list.txt", "table.csv", "table.parquet", "shard-{08..09}.tar"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_all_types_of_inputs(photos, request, kind, is_remote):
    """The images are in the same order. The password of a URL is not in the names."""
    source = str(photos / kind)
    if kind.endswith(".parquet"):
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"id": range(4), "image_url": [f"in/{name}" for name in HEIGHTS]}), source)
    if is_remote:
        pytest.importorskip("aiohttp", reason="fsspec reads HTTP by aiohttp")
        assert kind != "in" or pytest.skip("a server has no folders")
        source = f"{request.getfixturevalue('served')}/{kind}"
    images = found(source)
    assert list(images.values()) == list(HEIGHTS.values()) and "secret" not in str(images)
    before = {"in": [""] * 4, "shard-{08..09}.tar": [f"shard-{n:02}.tar/" for n in (8, 8, 9, 9)]}.get(kind, ["in/"] * 4)
    assert list(images) == [place + name for place, name in zip(before, HEIGHTS, strict=True)]


def test_tar_files_in_a_folder(photos):
    plain = photos / "shard-09.tar"
    (photos / "shard-09.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    names = [f"shard-0{8 + i // 2}.tar{'.gz' * (i // 2)}/{name}" for i, name in enumerate(HEIGHTS)]
    assert [image.name for image in find_images(photos, exclude=photos / "in")] == names
    # A tar file is not read to count its images.
    out = photos / "in/out"
    assert [number_of_images(folder, exclude=out) for folder in (photos, photos / "in")] == [0, 4]


@pytest.mark.parametrize("fault", ["two gzip members", "zeros", "two archives", "damaged header", "cut", "no header"])
def test_damaged_tar_files(photos, fault, caplog):
    """tarfile treats a damaged header, a missing header and zero blocks as the end of the file."""
    contents = (photos / "shard-09.tar").read_bytes()
    with tarfile.open(photos / "shard-09.tar") as tar:
        start = tar.getmembers()[1].offset
    before, after, zeros = contents[:start], contents[start:], bytes(1024)
    faulty = {"zeros": zeros + after, "two archives": zeros + contents, "damaged header": after[512:], "cut": b""}
    faulty["no header"] = bytes(512) + after[512:]
    if fault == "two gzip members":
        (photos / "faulty.tar.gz").write_bytes(gzip.compress(before) + gzip.compress(after))
    else:
        (photos / "faulty.tar").write_bytes(before + faulty[fault])
    first, *others, last = find_images(next(photos.glob("faulty.*")), exclude=photos / "in")
    assert first.read_size() and len(others) == (fault == "two archives")
    assert (f"faulty.tar' has zero blocks at byte {start}" in caplog.text) == (fault in ("zeros", "two archives"))
    if fault in ("two gzip members", "zeros", "two archives"):
        assert last.read_size() == (60, 60)
    else:
        with pytest.raises(UnreadableImage, match=rf"faulty\.tar.*{start + 512 * (fault == 'no header')}"):
            last.read_size()


@pytest.mark.parametrize("fault, reason", [("a pixel", "CRC"), ("cut", "ended"), ("more", "gzip")])
def test_the_checksum_of_a_compressed_tar_file_is_checked(photos, fault, reason):
    """The images come first, with a wrong pixel, and the error comes last."""
    content = bytearray(gzip.compress((photos / "shard-09.tar").read_bytes(), compresslevel=0))
    pixels = (photos / "in/b.bmp").read_bytes()[-500:]
    content[content.index(pixels) + 250] ^= 1
    if fault != "a pixel":
        content = gzip.compress((photos / "shard-09.tar").read_bytes())
        content = content[:-8] if fault == "cut" else content + b"no gzip"
    (photos / "faulty.tar.gz").write_bytes(content)
    *images, last = find_images(photos / "faulty.tar.gz", exclude=photos / "in")
    assert [image.read_size() for image in images] == [(50, 60), (60, 60)] and last.name == "faulty.tar.gz"
    with pytest.raises(UnreadableImage, match=rf"{reason}.*new output"):
        last.read_size()


def test_tar_files_without_images(photos, caplog):
    """A file of zeros, as after a failed download, is an error."""
    with tarfile.open(photos / "texts.tar", "w") as tar:
        tar.add(photos / "list.txt", "a.txt")
    (photos / "zeros.tar").write_bytes(bytes(10240))
    (photos / "list.txt").write_text("texts.tar\nzeros.tar")
    (zeros,) = find_images(photos / "list.txt", exclude=photos / "in")
    with pytest.raises(UnreadableImage, match=r"zeros\.tar.*only zeros"):
        zeros.read_size()
    assert "texts.tar' has no images" in caplog.text
    assert "Input" in message(find_images, photos / "texts.tar", exclude=photos)


def test_links_in_a_tar_file_are_errors(photos):
    """The target of a link may be before the current position of the stream."""
    with tarfile.open(photos / "links.tar", "w") as tar:
        tar.add(photos / "in/a.png", "a.png")
        for name, kind in (("b.png", tarfile.LNKTYPE), ("c.png", tarfile.SYMTYPE), ("d.png", tarfile.DIRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.png"
            tar.addfile(member)
    image, *links = find_images(photos / "links.tar", exclude=photos / "in")
    assert image.read_size() and [link.name for link in links] == ["links.tar/b.png", "links.tar/c.png"]
    for link in links:
        with pytest.raises(UnreadableImage, match=r"link to 'a\.png'.*--hard-dereference"):
            link.read_size()


def test_large_members_of_a_tar_file_are_not_read(photos, monkeypatch):
    size = (photos / "in/a.png").stat().st_size
    monkeypatch.setattr(image_listing, "MAX_MEMBER_SIZE", size)
    (photos / "large.png").write_bytes((photos / "in/a.png").read_bytes() + b"0")
    with tarfile.open(photos / "large.tar.gz", "w:gz") as tar:
        tar.add(photos / "large.png", "a.png")
        tar.add(photos / "in/a.png", "b.png")
    large, image = find_images(photos / "large.tar.gz", exclude=photos / "in")
    assert image.read_size()
    claim = tarfile.TarInfo("a.png")
    claim.size = 2**60  # more than the file has
    (photos / "claim.tar").write_bytes(claim.tobuf(tarfile.GNU_FORMAT))
    (photos / "list.txt").write_text("file:///dev/zero\nclaim.tar")
    device, claimed = find_images(photos / "list.txt", exclude=photos / "in")
    for one, reason in ((large, f"it has {size + 1:,} bytes"), (device, "not a regular"), (claimed, f"{2**60:,}")):
        with pytest.raises(UnreadableImage, match=reason):
            one.read_size()


def test_several_files(photos, monkeypatch):
    monkeypatch.chdir(photos / "in")
    paths = ["a.b/z.png", str(photos / "in/a.png"), "../shard-09.tar"]
    names = ["in/a.b/z.png", "in/a.png", "shard-09.tar/a/x.jpg", "shard-09.tar/b.bmp"]
    assert [image.name for image in find_images(paths, exclude=photos)] == names
    assert number_of_images(paths[:2], exclude=photos) == 2 and number_of_images(paths, exclude=photos) == 0
    several = [Path("a.png"), Path("a"), Path("b.bmp")]
    assert [image.name for image in find_images(several, exclude=photos)] == ["a.png", "a/x.jpg", "b.bmp"]
    assert number_of_images(list(map(str, several)), exclude=photos) == 3
    (photos / "in/empty").mkdir()
    expected = {"empty": "has no images", "absent.png": "does not exist", "../list.txt": "must be images"}
    for path, reason in expected.items():
        text = message(find_images, ["a.png", path], exclude=photos)
        assert f"'{path}'" in text and reason in text


def test_links_to_folders_are_skipped_with_a_warning(photos, caplog):
    (photos / "in/a/up").symlink_to(photos / "in", target_is_directory=True)
    assert list(found(photos / "in").values()) == list(HEIGHTS.values())
    assert f"{photos / 'in/a/up'}/', which is a link" in caplog.text


def test_other_files_are_counted_and_images_of_unsupported_types_are_listed(photos, caplog):
    for name in ("a/clip.mp4", "IMG_1.CR2", "raw", "report.pdf"):
        (photos / "in" / name).touch()
    (photos / "in/loop").symlink_to("loop")
    with tarfile.open(photos / "in/z.tar", "w") as tar:
        tar.add(photos / "in/IMG_1.CR2", "b.CR2")
    listed = [image.name for image in find_images(photos / "in", exclude=photos / "in/out")]
    assert listed[::5] == ["IMG_1.CR2", "z.tar/b.CR2"] and "no suffix (2), .mp4 (1), .txt (1), .pdf (1)." in caplog.text


def test_images_are_streamed(photos):
    (photos / "0.png").touch()
    images = find_images(photos / "{0..999999999999}.png", exclude=photos)
    assert [image.name for image in itertools.islice(images, 3)] == ["0.png", "1.png", "2.png"]


def test_parts_of_lists(photos, monkeypatch):
    """Each image is in one part, for any size of the parts and any line breaks."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (photos / "list.txt").write_bytes("\ufeffa.png\r\n\n  \xfc.jpg\rb.png \n\r\nhttps://a/c.png".encode())
    parquet.write_table(pa.table({"path": [f"{n}.png" for n in range(9)]}), photos / "list.parquet", row_group_size=2)
    for size, name in itertools.product((1, 5, 9, 2000), ("list.txt", "list.parquet", "table.csv")):
        monkeypatch.setattr(image_listing, "PART_BYTES", size)
        parts = image_listing.list_parts(photos / name, exclude="")
        assert [one for part in parts for one in part()] == list(list_paths(photos / name, exclude=""))
        assert (len(parts) > 1) == (size < 2000 and name != "table.csv")


def test_shards_are_disjoint_and_complete(photos):
    names = [f"in/{number}.png" for number in range(200)]
    members = []
    for order in (names, names[::-1]):
        (photos / "list.txt").write_text("\n".join(order))
        paths = [list_paths(photos / "list.txt", exclude=photos) for _ in range(3)]
        members.append([{name for name, _ in split_listed(paths[number], {}, (number, 3))} for number in range(3)])
    assert members[0] == members[1]
    assert sum(map(len, members[0])) == len(set.union(*members[0])) == 200


def test_shards_of_tar_files_are_balanced():
    sizes = {f"{number}.tar": int(size) for number, size in enumerate(np.random.default_rng(0).lognormal(20, 1, 128))}
    for known in (sizes, dict.fromkeys(sizes, 0)):
        shards = [set(archives_of_shard(known, (number, 16))) for number in range(16)]
        assert set.union(*shards) == sizes.keys() and sum(map(len, shards)) == 128
        totals = [sum(known[name] or 1 for name in shard) for shard in shards]
        assert max(totals) < 1.05 * np.mean(totals)


def test_unreadable_images_have_errors(photos):
    """An image, or the rest of a tar file. The other images are read."""
    content = (photos / "shard-08.tar").read_bytes()
    (photos / "cut.tar").write_bytes(content[: len(content) // 4])
    (photos / "list.txt").write_text("in/a.png\nabsent.png\nin\nfoo://host/a.png\nabsent.tar\ncut.tar")
    good, *bad = find_images(photos / "list.txt", exclude=photos)
    assert good.decode()[0].shape == (40, 60, 3)
    bad = [image for image in bad if image.name != "cut.tar/a.b/z.png"]
    assert [image.name for image in bad][-2:] == ["absent.tar", "cut.tar"]
    for read in (read for image in bad for read in (image.read_size, image.decode)):
        with pytest.raises(UnreadableImage):
            read()


@pytest.mark.parametrize(
    "source, options, named",
    [
        ("absent", {}, "absent"),
        ("clip.avi", {}, "video"),
        ("notes.heic", {}, "not an image of a known format. Run `pip install 'pillow-heif"),
        ("shard-{10..12}.tar", {}, "shard-10.tar"),
        ("table.csv", {"column": "path"}, "no column path. Use --column"),
        ("twice.csv", {}, "2 columns path"),
    ],
)
def test_invalid_inputs(photos, source, options, named):
    assert not source.endswith(image_listing.IMAGE_SUFFIXES) or pytest.skip("pillow-heif is installed")
    (photos / "notes.heic").write_text("not an image")
    (photos / "twice.csv").write_text("path,path\nin/a.png,in/b.bmp")
    assert named in (text := message(find_images, photos / source, exclude=photos, **options)) and "Fix" not in text


def test_pipes_are_errors(photos):
    """To read a pipe may take forever."""
    for name in ("pipe.txt", "pipe.tar"):
        os.mkfifo(photos / name)
    with pytest.raises(OSError, match="not a regular file"):
        find_images(photos / "pipe.txt", exclude=photos)
    (archive,) = find_images(photos / "pipe.tar", exclude=photos)
    with pytest.raises(UnreadableImage, match="not a regular file"):
        archive.decode()


def test_names_in_tar_files_are_utf8(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        tar.addfile(tarfile.TarInfo("\xfc.jpg"))
    assert [image.name for image in find_images(tmp_path / "a.tar", exclude=tmp_path)] == [r"a.tar/\udcfc.jpg"]
