"""The block hash is the same in every process, and two different things never hash alike."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import hashing

GOLDEN = "5ea5182ca9fb41a140677d0095d6e4f6"
SIZES = st.sampled_from([1, 16, 161])
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
ROOT = hashing.root_hash(fingerprint="f", layout="l", block_size=4)


def test_golden_value() -> None:
    """A change here makes every cache of every running cluster unreadable: it needs a new format version."""
    assert hashing.test_vector().hex() == GOLDEN


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_processes_agree(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from engine.hashing import test_vector; print(test_vector().hex())"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(hashing.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == GOLDEN


def test_every_field_of_the_root_matters_and_none_passes_for_another() -> None:
    plain = {"fingerprint": "f", "layout": "l", "block_size": 16}
    variants = [
        plain,
        {**plain, "fingerprint": "S"},
        {**plain, "layout": "S"},
        {**plain, "block_size": 32},
        {**plain, "salt": "S"},
        {**plain, "lora": "S"},
        {**plain, "multimodal": "S"},
        {**plain, "salt": "S", "lora": "S"},
        {**plain, "fingerprint": "fl", "layout": ""},
        {**plain, "fingerprint": "", "layout": "fl"},
        {**plain, "salt": "ab", "lora": "c"},
        {**plain, "salt": "a", "lora": "bc"},
    ]
    roots = {hashing.root_hash(**fields) for fields in variants}
    assert len(roots) == len(variants)
    assert all(len(root) == hashing.HASH_BYTES == 16 for root in roots)


def test_a_block_names_its_whole_past() -> None:
    """The same last block behind another start is another block."""
    a = hashing.block_hashes([1] * 4 + [5] * 4, 4, ROOT)
    c = hashing.block_hashes([2] * 4 + [5] * 4, 4, ROOT)
    other_root = hashing.block_hashes(
        [1] * 4 + [5] * 4, 4, hashing.root_hash(fingerprint="g", layout="l", block_size=4)
    )
    assert len({*a, *c, *other_root}) == 6


def test_only_full_blocks_count() -> None:
    assert hashing.block_hashes([1, 2, 3], 4, ROOT) == []
    assert hashing.block_hashes([1, 2, 3, 4, 5], 4, ROOT) == hashing.block_hashes([1, 2, 3, 4], 4, ROOT)


@given(tokens=TOKENS, cut=st.integers(0, 10))
def test_hashing_goes_on_from_any_block(tokens: list[int], cut: int) -> None:
    whole = hashing.block_hashes(tokens, 4, ROOT)
    head = whole[:cut]
    assert len(whole) == len(tokens) // 4
    assert head + hashing.block_hashes(tokens[4 * len(head) :], 4, head[-1] if head else ROOT) == whole


@given(a=TOKENS, b=TOKENS)
def test_hashes_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int]) -> None:
    pairs = zip(hashing.block_hashes(a, 4, ROOT), hashing.block_hashes(b, 4, ROOT), strict=False)
    for i, (left, right) in enumerate(pairs):
        assert (left == right) == (a[: 4 * i + 4] == b[: 4 * i + 4])


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40),
    place=st.integers(0, 39),
    flip=st.integers(0, 31),
)
def test_one_bit_changes_its_block_and_all_behind(tokens: list[int], place: int, flip: int) -> None:
    tokens = tokens[: len(tokens) // 4 * 4]
    place %= len(tokens)
    changed = list(tokens)
    changed[place] ^= 1 << flip
    before, after = hashing.block_hashes(tokens, 4, ROOT), hashing.block_hashes(changed, 4, ROOT)
    assert [left == right for left, right in zip(before, after, strict=True)] == [
        i < place // 4 for i in range(len(before))
    ]


NAMES = st.one_of(st.text(max_size=6), st.sampled_from(["", "S", "16", "tandem-kv-1", "\0", "\1\0\0\0S"]))
ROOTS = st.fixed_dictionaries(
    {"fingerprint": NAMES, "layout": NAMES, "salt": NAMES, "lora": NAMES, "multimodal": NAMES, "block_size": SIZES}
)


@given(a=ROOTS, b=ROOTS)
def test_roots_are_equal_exactly_if_all_fields_are(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Whatever names come later for adapters and images: none of them can pass for a salt or a part of another."""
    assert (hashing.root_hash(**a) == hashing.root_hash(**b)) == (a == b)


def test_no_two_of_very_many_names_meet() -> None:
    """As many as would meet often if only some bits of a name's digest counted."""
    plain: dict[str, Any] = {"fingerprint": "f", "layout": "l", "block_size": 16}
    names = [f"{number:064x}" for number in range(70_000)]
    roots = {hashing.root_hash(**plain, **{field: name}) for field in ("lora", "multimodal", "salt") for name in names}
    assert len(roots) == 3 * len(names)
