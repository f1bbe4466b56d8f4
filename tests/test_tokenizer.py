"""Text to ids and back: bytes without any file, a tokenizer.json through its package, refusals that say what to do."""

import json
import sys

import pytest

from echo_jax.checkpoints.tokenizer import ByteTokenizer, JsonTokenizer, end_token_ids, load_tokenizer


def byte_folder(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    return folder


def test_any_bytes_are_a_prompt(tmp_path):
    tokenizer = load_tokenizer(byte_folder(tmp_path))
    assert isinstance(tokenizer, ByteTokenizer)
    every = bytes(range(256)) * 2
    assert tokenizer.encode(every) == list(every)
    assert tokenizer.decode_bytes([*every, 256, 300]) == every
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3, 0xA9, 0xFF]) == "é\ufffd"


def test_streamed_bytes_are_cut_between_characters():
    text = "aé€😀\n"
    stream = ByteTokenizer().stream()
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text and stream.end() == ""
    assert pieces[:3] == ["a", "", "é"]
    assert stream.push(0xE2) == "" and stream.push(300) == "" and stream.end() == "\ufffd"


def test_a_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the hf extra")
    words = {"[UNK]": 0, "echo": 1, "cache": 2, "</s>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer) and tokenizer.vocab_size == 4
    assert tokenizer.encode("echo cache") == tokenizer.encode(b"echo cache") == [1, 2]
    assert tokenizer.decode([1, 2, 3]) == "echo cache"
    stream = tokenizer.stream()
    assert [stream.push(1), stream.push(2), stream.push(3), stream.end()] == ["echo", " cache", "", ""]
    with pytest.raises(ValueError, match="not UTF-8 .byte 1 is 0xff"):
        tokenizer.encode(b"a\xff")


def test_byte_pieces_of_one_character_wait_for_each_other():
    """A tokenizer whose tokens are parts of characters, as byte-level BPE has them."""

    class Pieces:
        def get_vocab_size(self):
            return 256

        def decode(self, tokens, skip_special_tokens):
            return bytes(tokens).decode("utf-8", errors="replace")

    stream = JsonTokenizer(Pieces()).stream()
    pieces = [stream.push(byte) for byte in "a€b".encode()]
    assert pieces == ["a", "", "", "€", "b"]
    assert stream.push(0xE2) == "" and stream.end() == "\ufffd"


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json; fetch it .*ByteTokenizer"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the hf extra")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a usable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_config_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        load_tokenizer(tmp_path)


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'echo-jax\[hf\]'"):
        load_tokenizer(tmp_path)


def test_end_tokens(tmp_path):
    assert end_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert end_token_ids(tmp_path) == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_token_ids(tmp_path) == (5, 6)
    (tmp_path / "generation_config.json").write_text("not json")
    with pytest.raises(ValueError, match="is not JSON"):
        end_token_ids(tmp_path)
