"""A file's bytes as ids, in three parts that follow each other."""

import pytest

from backbones import InputError
from projects_vil.sequence.char_lm import Vocabulary, read_text


@pytest.mark.parametrize("length", [100, 1013, 2999])
def test_the_parts_follow_each_other_and_leave_nothing_out(tmp_path, length):
    data = bytes(32 + (7 * i * i + i) % 90 for i in range(length))
    (tmp_path / "text").write_bytes(data)
    text = read_text(tmp_path / "text")
    train, dev, test = (text.vocabulary.decode(part.tolist()) for part in (text.train, text.dev, text.test))
    assert len(train) == length * 90 // 100
    assert len(train) + len(dev) - 1 == length * 95 // 100
    # Dev and test begin with the byte from which their first one is predicted.
    assert (dev[0], test[0]) == (train[-1], dev[-1])
    unknown = set(data) - set(train)
    assert train + dev[1:] + test[1:] == bytes(ord("?") if byte in unknown else byte for byte in data)


def test_the_vocabulary_is_that_of_the_training_part(tmp_path):
    (tmp_path / "text").write_bytes(b"ab" * 90 + b"\xff\x00" * 10)
    text = read_text(tmp_path / "text")
    assert text.vocabulary.known == [ord("a"), ord("b")]
    assert len(text.vocabulary) == 3
    assert text.vocabulary.encode(b"ba\xff\x00").tolist() == [1, 0, 2, 2]
    assert text.vocabulary.other == 2 == text.test[-1]


def test_all_bytes_can_be_known():
    vocabulary = Vocabulary(range(256))
    assert vocabulary.encode(bytes(range(256))).tolist() == list(range(256))
    assert len(vocabulary) == 257


def test_a_trained_vocabulary_is_kept(tmp_path):
    (tmp_path / "text").write_bytes(b"abc" * 100)
    text = read_text(tmp_path / "text", vocabulary=Vocabulary([ord("b"), ord("c")]))
    assert text.train[:3].tolist() == [2, 0, 1]


@pytest.mark.parametrize("data, said", [(b"", "has 0 bytes"), (b"x" * 99, "has 99 bytes"), (None, "there is no text")])
def test_a_file_that_is_no_text_is_named(tmp_path, data, said):
    if data is not None:
        (tmp_path / "text").write_bytes(data)
    with pytest.raises(InputError, match=said) as raised:
        read_text(tmp_path / "text")
    assert str(tmp_path / "text") in str(raised.value)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        read_text(tmp_path)


@pytest.mark.parametrize("known", [[], [2, 1], [1, 1], [-1, 3], [3, 256]])
def test_a_vocabulary_is_of_rising_bytes(known):
    with pytest.raises(InputError, match="in rising order"):
        Vocabulary(known)


def test_a_prompt_is_of_known_bytes():
    vocabulary = Vocabulary(sorted(b"abc"))
    assert vocabulary.encode_prompt("cab").tolist() == [2, 0, 1]
    with pytest.raises(InputError, match="byte 2, 'x', is not in the text"):
        vocabulary.encode_prompt("ax")
    with pytest.raises(InputError, match="byte 1, 0xc3, is not in the text"):
        vocabulary.encode_prompt("ä")
    with pytest.raises(InputError, match="--prompt is empty"):
        vocabulary.encode_prompt("")
