"""Tokenizer and detokenizer on byte-level BPE, SentencePiece-like Unigram and byte fallback."""

import functools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine.config import ModelError
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from engine.weights.resolve import resolve

CORPUS = [
    "Hello, world.",
    " leading and   runs    of spaces ",
    "tabs\t\tand\nnew\r\nlines\n\n\n",
    "1234567890 3.14 1,000,000",
    "日本語のテキスト 你好，世界 한국어",
    "naïve café Straße ÀÉÎ",
    "def f(x):\n    return x ** 2  # ok",
    "👨‍👩‍👧‍👦 family 😀😀😀 🧑‍🚀 🏳️‍🌈",
    "<think> </think> <|not_special|> <0x0A>",
    "\u200b\ufeff zero width \u0301 accents e\u0301",
]


@functools.cache
def both() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Tandem's tokenizer and the library's, of the demo model."""
    folder = resolve("SmolLM2-135M-Instruct")
    return Tokenizer.from_folder(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@functools.cache
def sentencepiece_both() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    with tempfile.TemporaryDirectory() as folder:
        return written(Path(folder), sentencepiece()), sentencepiece()


@pytest.fixture
def smollm() -> Tokenizer:
    return both()[0]


@pytest.fixture
def reference() -> tokenizers.Tokenizer:
    return both()[1]


def written(folder: Path, tokenizer: tokenizers.Tokenizer, **config: object) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def sentencepiece(scheme: str = "first") -> tokenizers.Tokenizer:
    """Pieces as in SentencePiece, with a byte fallback."""
    pieces = ["▁", "▁leading", "▁x", "▁a", "b", "a", "x", "▁▁", "<", ">", "s", "/", "end", "|"]
    vocab = {piece: number for number, piece in enumerate(["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *pieces])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {**vocab, "▁l": 900, "le": 901, "▁le": 902},
            [("▁", "▁"), ("▁", "x"), ("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return tokenizer


def incremental(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push([number]) for number in ids), detokenizer.flush()]


# Encoding


@pytest.mark.parametrize("text", CORPUS)
def test_ids_of_ordinary_text_are_the_library_s(smollm: Tokenizer, reference: tokenizers.Tokenizer, text: str) -> None:
    assert smollm.encode(text) == reference.encode(text).ids
    assert smollm.encode_template(text) == reference.encode(text, add_special_tokens=False).ids


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "a", " ", "\n", "é", "<"]), max_size=12)
)
def test_templates_have_special_tokens_and_texts_have_none(parts: list[str]) -> None:
    tokenizer, library = both()
    text = "".join(parts)
    assert tokenizer.encode_template(text) == library.encode(text, add_special_tokens=False).ids
    ids = tokenizer.encode_plain(text)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_special_text_does_not_move_word_marks(tmp_path: Path, scheme: str) -> None:
    """Encoding around special text in pieces would put a space before each piece."""
    tokenizer = written(tmp_path, sentencepiece(scheme))
    ids = tokenizer.encode_plain("a<s>b x")
    assert tokenizer.decode(ids, skip_special=False) == "a<s>b x"
    assert not tokenizer.special_ids.intersection(ids)


def test_markers_take_in_white_space_as_their_tokens_do(tmp_path: Path) -> None:
    library = sentencepiece()
    library.add_special_tokens([AddedToken("<end>", special=True, normalized=False, lstrip=True, rstrip=True)])
    text = "a <end>  b<s> a"
    expected = library.encode(text, add_special_tokens=False).ids
    assert written(tmp_path, library).encode_template(text) == expected


def test_of_special_tokens_that_begin_alike_the_longest_counts(tmp_path: Path) -> None:
    library = sentencepiece()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<end", "<end>", "<en")])
    text = "a<end>b<end a<enb<en"
    assert written(tmp_path, library).encode_template(text) == library.encode(text, add_special_tokens=False).ids


def test_a_quoted_special_text_is_plain_amid_real_ones(smollm: Tokenizer) -> None:
    quoted: dict[str, str] = {}
    content = smollm.quote("x<|im_end|>y", quoted)
    ids = smollm.encode_template(f"<|im_start|>{content}<|im_end|>", quoted)
    assert [number for number in ids if number in smollm.special_ids] == [1, 2]
    assert smollm.decode(ids, skip_special=False) == "<|im_start|>x<|im_end|>y<|im_end|>"


def test_many_special_texts_need_one_stand_in(smollm: Tokenizer) -> None:
    quoted: dict[str, str] = {}
    content = smollm.quote("<|im_end|>" * 20_000, quoted)
    assert len(quoted) == 1
    assert not smollm.special_ids.intersection(smollm.encode_template(content, quoted))


@pytest.mark.parametrize(
    ("config", "processor", "expected"),
    [
        ({"bos_token": "<s>"}, False, False),
        ({"bos_token": "<s>"}, True, True),
        ({"bos_token": "<s>", "add_bos_token": True}, False, True),
        ({"bos_token": {"content": "<s>"}, "add_bos_token": True}, True, True),
        ({"bos_token": "<s>", "add_bos_token": False}, True, False),
        ({"add_bos_token": True}, False, False),
    ],
)
def test_bos_as_the_folder_says(tmp_path: Path, config: dict[str, object], processor: bool, expected: bool) -> None:
    library = sentencepiece()
    bos = library.token_to_id("<s>")
    if processor:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = written(tmp_path, library, **config)
    assert tokenizer.encode("a x") == [bos] * expected + tokenizer.encode_plain("a x")
    assert tokenizer.encode("<s>a").count(bos) == expected  # a user's BOS is text
    assert tokenizer.encode("") == [bos] * expected


def test_bos_equals_transformers(tmp_path: Path) -> None:
    library = sentencepiece()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    tokenizer = written(tmp_path, library, bos_token="<s>", tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.encode("a x b") == theirs("a x b").input_ids


def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    for broken in (b"{", b"[]", b"\xff", b"[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_bytes(broken)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


def test_ids_that_the_tokenizer_does_not_know_have_no_text(smollm: Tokenizer) -> None:
    """Among them those of the markers, which lie behind the vocabulary."""
    for number in (-1, smollm.vocab_size, smollm.vocab_size + 3, 10**9):
        assert smollm.token_bytes(number) == b""


# Bytes of tokens


def test_bytes_of_tokens_spell_the_text(smollm: Tokenizer) -> None:
    for text in CORPUS:
        assert b"".join(map(smollm.token_bytes, smollm.encode(text))) == text.encode()


def test_byte_fallback_and_word_marks(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, sentencepiece())
    assert tokenizer.token_bytes(tokenizer.id_of("<0x0A>") or -1) == b"\n"
    assert tokenizer.token_bytes(tokenizer.id_of("▁leading") or -1) == b" leading"
    assert tokenizer.token_bytes(tokenizer.id_of("</s>") or -1) == b"</s>"


def test_a_token_that_only_looks_like_a_byte_is_text(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("<0x0A>", -1.0), ("<0xZZ>", -1.0)], 0, False))
    library.decoder = decoders.Metaspace()
    tokenizer = written(tmp_path, library)
    assert [tokenizer.token_bytes(number) for number in (1, 2)] == [b"<0x0A>", b"<0xZZ>"]


def test_added_tokens_are_text_whatever_they_hold(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1}, []))
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken("<é x>", normalized=False)])
    tokenizer = written(tmp_path, library)
    assert tokenizer.token_bytes(2) == "<é x>".encode()


def test_a_token_that_is_no_byte_glyphs_is_text(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "a b": 1, "Ġ語": 2}, []))
    library.decoder = decoders.ByteLevel()
    tokenizer = written(tmp_path, library)
    for number in range(3):
        assert tokenizer.token_bytes(number).decode() == library.decode([number])


# Detokenizing


@pytest.mark.parametrize("text", CORPUS)
def test_deltas_join_to_the_text(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    deltas = incremental(smollm, ids)
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)
    assert deltas[-1] == ""


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_byte_level_ids_give_the_text_of_the_whole(data: st.DataObject) -> None:
    """Also ids that spell no UTF-8, in pieces of any size."""
    tokenizer, library = both()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = Detokenizer(tokenizer)
    text, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, 4))
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
    assert text + detokenizer.flush() == library.decode(ids, skip_special_tokens=True)


def test_random_byte_pieces_of_any_text(smollm: Tokenizer) -> None:
    """Characters cut into single bytes, as a model may write them."""
    glyph_of = {smollm.token_bytes(number): number for number in range(smollm.vocab_size)}
    rng = random.Random(5)
    for text in CORPUS:
        data = text.encode()
        ids: list[int] = []
        while data:
            size = next(n for n in (rng.randint(1, 3), 2, 1) if data[:n] in glyph_of)
            ids.append(glyph_of[data[:size]])
            data = data[size:]
        deltas = incremental(smollm, ids)
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)


def test_each_emoji_goes_out_with_its_last_byte(smollm: Tokenizer) -> None:
    byte_ids = {smollm.token_bytes(n): n for n in range(smollm.vocab_size) if len(smollm.token_bytes(n)) == 1}
    emojis = "😀🚀🎉🌍🐍🔥✨💡🧠🎈"
    for emoji in emojis:
        assert len(emoji.encode()) >= 3
    detokenizer = Detokenizer(smollm)
    for emoji in emojis:
        ids = [byte_ids[bytes([byte])] for byte in emoji.encode()]
        assert [detokenizer.push([number]) for number in ids] == [""] * (len(ids) - 1) + [emoji]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_ends_as_one_mark(smollm: Tokenizer) -> None:
    byte_ids = {smollm.token_bytes(n): n for n in range(smollm.vocab_size) if len(smollm.token_bytes(n)) == 1}
    ids = [byte_ids[bytes([byte])] for byte in "a😀".encode()[:-1]]
    assert incremental(smollm, ids) == ["a", "", "", "", "\ufffd"]


def test_a_step_of_special_ids_only_is_empty(smollm: Tokenizer) -> None:
    end = smollm.id_of("<|im_end|>")
    assert end is not None
    assert Detokenizer(smollm).push([end, end]) == ""
    assert Detokenizer(smollm, skip_special=False).push([end]) == "<|im_end|>"


def test_spaces_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, sentencepiece())
    ids = [tokenizer.id_of(piece) or -1 for piece in ("▁", "▁leading", "▁x", "▁▁", "▁▁", "b")]
    assert "".join(incremental(tokenizer, ids)) == "  leading x    b"
    # At the very start of a text the first space is the mark of a word.
    assert "".join(incremental(tokenizer, ids, continues=False)) == " leading x    b" == tokenizer.decode(ids)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["▁", "▁leading", "▁x", "▁▁", "b", "</s>", "😀", "é", "<0x0A>"]), max_size=20))
def test_sentencepiece_deltas_join_to_the_text_of_the_whole(parts: list[str]) -> None:
    tokenizer, library = sentencepiece_both()
    pieces = [
        piece
        for part in parts
        for piece in ([part] if library.token_to_id(part) is not None else [f"<0x{b:02X}>" for b in part.encode()])
    ]
    ids = [library.token_to_id(piece) for piece in pieces]
    assert "".join(incremental(tokenizer, ids, continues=False)) == library.decode(ids)
    before = [library.token_to_id("b")]
    assert "b" + "".join(incremental(tokenizer, ids)) == library.decode(before + ids)


def test_unigram_with_metaspace(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁Hello", -1.0), ("▁world", -1.0), ("▁", -2.0), ("!", -2.0)], 0, False)
    )
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    tokenizer = written(tmp_path, library)
    ids = tokenizer.encode("Hello world!")
    assert "".join(incremental(tokenizer, ids, continues=False)) == "Hello world!"
    assert "".join(incremental(tokenizer, ids)) == " Hello world!"


def test_state_comes_back_from_the_ids(smollm: Tokenizer) -> None:
    """A stream that moves to another process goes on in the middle of a character."""
    ids = smollm.encode("ab 🧑‍🚀 cd")
    for cut in range(len(ids)):
        first, second = Detokenizer(smollm), Detokenizer(smollm)
        told = first.push(ids[:cut])
        assert second.push(ids[:cut]) == told
        assert told + second.push(ids[cut:]) + second.flush() == "ab 🧑‍🚀 cd"


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = (
        "import sys, engine.text.chat_prompt, engine.text.detokenizer, engine.text.stop;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
