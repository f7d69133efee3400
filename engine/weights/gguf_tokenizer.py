"""Writes the tokenizer and chat template that a GGUF file carries as `tokenizer.json` and friends."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.config import ModelError
from engine.weights.gguf_file import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# How each family splits text before merging; the names are those of `tokenizer.ggml.pre`.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "gpt-2": _byte_level,
    "default": _byte_level,
}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ModelError for unknown kinds."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelError(f"{file.path}: tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2')")
    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{file.path}: pre-tokenizer {pre!r} is not known; these are: {', '.join(_PRE_TOKENIZERS)}")
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    if not tokens or len(set(tokens)) != len(tokens):
        raise ModelError(f"{file.path}: the key tokenizer.ggml.tokens is missing, or names a token twice")
    types = list(file.get("tokenizer.ggml.token_type", np.ndarray, [_NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens have {len(types)} types in tokenizer.ggml.token_type")

    def token(name: str) -> str | None:
        number = file.get(f"tokenizer.ggml.{name}_token_id", int, -1)
        return tokens[number] if 0 <= number < len(tokens) else None

    # Where the key is absent, Llama 3 begins with BOS and the others do not.
    add_bos = file.get("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe") and token("bos") is not None
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list, [])]
    try:
        model = BPE({token: number for number, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens and tokenizer.ggml.merges do not fit: {error}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    by_type = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in by_type if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in by_type if k == _USER_DEFINED])
    if add_bos:
        bos = token("bos")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "add_bos_token": add_bos,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    if template := file.get("tokenizer.chat_template", str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
