"""JSON files, and folders that are written completely or not at all."""

import json

import pytest

from projects_vil import files
from tests.projects_vil.helpers import message

ITEM = '{"id": 1, "box": [0.1, 2, 3.25e2], "rle": {"size": [2, 3], "counts": "}, {"}}'


@pytest.mark.parametrize("large", [0, 1 << 29])
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f'{{"info": {{"items": [{ITEM}]}}, "items": [{ITEM}, {ITEM} ,\n{ITEM}], "last": [{{}}]}}', None),
        (f'{{"items": [{ITEM}, 5]}}', None),
        (f'{{"items": [{ITEM}, {{"parts": [{ITEM}, {{}}], "id": 2}}], "last": {{"id": 3}}}}', None),
        (f'{{"items" : [{ITEM}, {ITEM}],"last": "\\"items\\": [{{"}}', None),
        ('{"items": [{"id": 123456789012345678901, "area": 0.1234567890123456789}, {"b": NaN, "c": -Infinity}]}', None),
        ('{"items": [], "others": {"items": [{"id": 1}], "last": 1}}', None),
        (f'{{"items": [{ITEM}, {{"id": 1, "id": 2}}]}}', "duplicate key 'id'"),
        (f'{{"items": [{ITEM}], "items": [{ITEM}]}}', "duplicate key 'items'"),
        (f'{{"items": [{ITEM}, {{"a" : {{"b": 1, "b" : 1}}, "c": "\\":"}}]}}', "duplicate key 'b'"),
        (f'{{"items": [{ITEM}, {{"name": "\\ud800"}}]}}', "unpaired surrogate"),
        (f'{{"items": [{ITEM}, {ITEM}', "not valid JSON"),
    ],
)
def test_json_is_read_as_pythons_parser_reads_it(text, error, large, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGE_FILE", large)
    monkeypatch.setattr(files, "_PART", 1)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "a.json").write_text(text, encoding=encoding)
        if error:
            assert error in message(files.read_json, tmp_path / "a.json", lists=["items"])
            continue
        read = files.read_json(tmp_path / "a.json", lists=["items"])
        assert repr(read | {"items": [*read["items"]]}) == repr(json.loads(text))


@pytest.mark.parametrize("is_new", [True, False])
def test_an_error_leaves_a_folder_as_it_was(tmp_path, is_new):
    folder = tmp_path / "export"
    if not is_new:
        folder.mkdir()
        (folder / "model.ts").write_text("old")
    with pytest.raises(KeyboardInterrupt), files.atomic_folder(folder) as unfinished:
        (unfinished / "model.ts").write_text("new")
        raise KeyboardInterrupt
    assert folder.exists() != is_new
    assert is_new or [path.read_text() for path in folder.iterdir()] == ["old"]
    with files.atomic_folder(folder) as unfinished:
        (unfinished / "model.ts").write_text("new")
        (unfinished / "model.ts").replace(folder / "model.ts")
    assert [path.read_text() for path in folder.iterdir()] == ["new"]
