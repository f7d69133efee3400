"""Text of an exact number of tokens on tokenizers of the families in use, and where tokenizers are found."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bench.errors import BenchError
from bench.workloads.base import Literal, Synthetic
from bench.workloads.registry import SAMPLES
from bench.workloads.tokenizer import find_tokenizer
from bench.workloads.words import TokenWords
from engine.weights.resolve import resolve

POEMS = (SAMPLES / "sonnets.txt").read_text()


def metaspace_unigram() -> tokenizers.Tokenizer:
    """As of T5 and XLNet."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=800, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(POEMS.splitlines(), trainer)
    return tokenizer


def spaced_bpe() -> tokenizers.Tokenizer:
    """As of Llama 2: the whole text is one piece, a space is put before it, BOS before that."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<unk>", "<s>"]
    tokenizer.train_from_iterator(
        POEMS.splitlines(), trainers.BpeTrainer(vocab_size=1500, special_tokens=specials, show_progress=False)
    )
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_bpe() -> tokenizers.Tokenizer:
    """As of Llama 3: bytes, BOS before the text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*POEMS.splitlines(), *POEMS.split()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def smollm2() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(resolve() / "tokenizer.json"))


FAMILIES = {"smollm2": smollm2, "byte bpe": byte_bpe, "spaced bpe": spaced_bpe, "metaspace unigram": metaspace_unigram}


@pytest.fixture(scope="session", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return FAMILIES[request.param]()


@pytest.fixture(scope="session")
def any_words(tokenizer: tokenizers.Tokenizer) -> TokenWords:
    return TokenWords(tokenizer)


def ids_of(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


# Words


def test_so_many_words_are_so_many_tokens(tokenizer: tokenizers.Tokenizer, any_words: TokenWords) -> None:
    rng = np.random.default_rng(1)
    for seed in range(60):
        tokens = int(rng.integers(1, 3000))
        ids = ids_of(tokenizer, any_words.render([Synthetic((seed,), tokens)]))
        assert len(ids) == tokens


def test_a_longer_part_begins_with_the_shorter_one(tokenizer: tokenizers.Tokenizer, any_words: TokenWords) -> None:
    long = ids_of(tokenizer, any_words.render([Synthetic((3, 1), 700)]))
    for tokens in (1, 2, 100, 512, 699):
        assert ids_of(tokenizer, any_words.render([Synthetic((3, 1), tokens)])) == long[:tokens]
    other = ids_of(tokenizer, any_words.render([Synthetic((3, 2), 700)]))
    assert sum(a == b for a, b in zip(long, other, strict=True)) < 100


def test_parts_keep_their_tokens_together(tokenizer: tokenizers.Tokenizer, any_words: TokenWords) -> None:
    parts = [Synthetic((n,), tokens) for n, tokens in enumerate((33, 1, 512, 7))]
    ids = ids_of(tokenizer, any_words.render(parts))
    alone = [ids_of(tokenizer, any_words.render([part])) for part in parts]
    assert ids == [token for part in alone for token in part]


@pytest.mark.parametrize("make", [smollm2, byte_bpe])
def test_words_stay_whole_when_a_chat_template_strips_them(make: Callable[[], tokenizers.Tokenizer]) -> None:
    words = TokenWords(make())
    for seed in range(50):
        text = words.render([Synthetic((seed,), 20)]).strip()
        assert words.count(f"user\n{text}") == words.count("user\n") + 20


LITERALS = {
    "short": "Thou art more lovely",
    "long": POEMS[:5000],
    "other scripts": "Füße 東京タワー 👩‍👩‍👧‍👦🏳️‍🌈 naïve Привет мир " * 9,
    "white space": "a  b\n\n\n   c\t\td \n\n ",
    "code": "def f(x):\n    return {x: [1, 2, 345678]}  # why?\n\n" * 5,
    "empty": "",
}


@pytest.mark.parametrize("name", LITERALS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 64, 65, 66, 67, 400, 2500])
def test_a_text_is_cut_or_lengthened_to_its_tokens(name: str, tokens: int, any_words: TokenWords) -> None:
    literal = Literal(LITERALS[name], tokens)
    assert any_words.count(any_words.render([literal])) == tokens
    mixed = [Synthetic((1,), 5), literal, Synthetic((2,), 40), literal]
    assert any_words.count(any_words.render(mixed)) == 45 + 2 * tokens


def test_a_text_that_fits_stays_as_it_is(any_words: TokenWords) -> None:
    line = "But thy eternal summer shall not fade"
    assert any_words.render([Literal(line, any_words.count(line))]) == line
    assert any_words.render([Literal(line)]) == line
    assert any_words.render([Literal(line, 200)]).startswith(line + " ")
    assert line.startswith(any_words.render([Literal(line, 1)]).strip())


def test_opening_tokens() -> None:
    overheads = {name: TokenWords(make()).overhead for name, make in FAMILIES.items()}
    assert overheads == {"smollm2": 0, "byte bpe": 1, "spaced bpe": 1, "metaspace unigram": 0}


def test_a_tokenizer_config_tells_of_bos(tmp_path: Path) -> None:
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    byte_bpe().save(str(path))
    assert TokenWords.from_file(path).overhead == 1
    config.write_text('{"add_bos_token": false, "bos_token": "<s>"}')
    assert TokenWords.from_file(path).overhead == 0
    config.write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    assert TokenWords.from_file(path).overhead == 1
    config.write_text('{"bos_token": "<s>"}')
    assert TokenWords.from_file(path).overhead == 1
    config.write_text("{")
    with pytest.raises(BenchError, match=r"tokenizer_config\.json"):
        TokenWords.from_file(path)


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (None, "", "{}", "[1]"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(BenchError, match=r"is no tokenizer\.json"):
            TokenWords.from_file(path)
    poor = tokenizers.Tokenizer(models.BPE())
    poor.pre_tokenizer = pre_tokenizers.ByteLevel()
    poor.train_from_iterator(["one two"], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    poor.save(str(path))
    with pytest.raises(BenchError, match=r"tokenizer\.json: only \d+ lowercase English words"):
        TokenWords.from_file(path)


def test_limits_in_a_tokenizer_file_do_not_count(tmp_path: Path) -> None:
    limited = byte_bpe()
    limited.enable_truncation(64)
    limited.enable_padding(length=100)
    limited.save(str(tmp_path / "tokenizer.json"))
    words = TokenWords.from_file(tmp_path / "tokenizer.json")
    assert words.count(words.render([Synthetic((1,), 300)])) == 300
    assert words.count(words.render([Synthetic((1,), 3)])) == 3


# Where the tokenizer is found


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models."""
    for variable in ("HF_HUB_CACHE", "TANDEM_CACHE", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".cache"


def put(folder: Path, age: float = 0.0) -> Path:
    """A tokenizer file in the folder, so many seconds old."""
    folder.mkdir(parents=True)
    file = folder / "tokenizer.json"
    file.write_text("{}")
    os.utime(file, (1e9 - age, 1e9 - age))
    return file


def test_tokenizers_that_the_user_names(caches: Path) -> None:
    file = put(caches.parent / "model")
    hub = put(caches / "huggingface" / "hub" / "models--org--name" / "snapshots" / "abc")
    assert find_tokenizer("model", "served", "") == file
    assert find_tokenizer(str(file), "served", "") == file
    assert find_tokenizer("~/model", "served", "") == file
    assert find_tokenizer("org/name", "served", "") == hub
    for wrong in ("elsewhere", str(caches), "org/other", "../model/none.json"):
        with pytest.raises(BenchError, match="--tokenizer"):
            find_tokenizer(wrong, "model", "model")


def test_tokenizers_by_what_the_server_says(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match=r"tokenizer of org/name is not on this machine.* --tokenizer"):
        find_tokenizer("", "org/name", "")
    own = put(caches / "tandem" / "models" / "name.Q4_1-0123456789abcdef", age=5)
    assert find_tokenizer("", "org/name", "/models/gone") == own
    newer = put(caches / "tandem" / "models" / "name-fedcba9876543210", age=1)
    assert find_tokenizer("", "name", "") == newer
    snapshots = caches / "huggingface" / "hub" / "models--org--name" / "snapshots"
    put(snapshots / "a", age=9)
    hub = put(snapshots / "b", age=8)
    assert find_tokenizer("", "org/name", "") == hub
    monkeypatch.setenv("HF_HOME", str(caches / "moved"))
    moved = put(caches / "moved" / "hub" / "models--org--name" / "snapshots" / "c")
    assert find_tokenizer("", "org/name", "") == moved
    root = put(caches.parent / "root")
    assert find_tokenizer("", "org/name", str(root.parent)) == root


def test_models_of_similar_names_are_others(caches: Path) -> None:
    models_folder = caches / "tandem" / "models"
    put(models_folder / "Qwen3-8B.Q4_1-0123456789abcdef")
    put(models_folder / "Qwen3.5-8B-0123456789abcdef")
    put(models_folder / "MyQwen3-0123456789abcdef")
    for name in ("Qwen3", "Qwen3-8", "*", "Qwen.-8B"):
        with pytest.raises(BenchError):
            find_tokenizer("", name, "")
    assert find_tokenizer("", "/models/Qwen3-8B.Q4_1.gguf", "").parent.name == "Qwen3-8B.Q4_1-0123456789abcdef"


def test_links_in_the_hub_cache_stay(caches: Path) -> None:
    hub = caches / "huggingface" / "hub" / "models--org--name"
    (hub / "blobs").mkdir(parents=True)
    byte_bpe().save(str(hub / "blobs" / "e3b0"))
    snapshot = hub / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to(hub / "blobs" / "e3b0")
    (snapshot / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert TokenWords.from_file(find_tokenizer("", "org/name", "")).overhead == 0
