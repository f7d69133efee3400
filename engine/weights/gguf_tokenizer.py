"""Writes the tokenizer and chat template that a GGUF file carries as `tokenizer.json` and friends."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.config import ModelError

_CONTROL, _USER_DEFINED = 3, 4

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


def write_tokenizer(source: Path, fields: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ModelError for unknown kinds."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"{source}: tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2')")
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{source}: pre-tokenizer {pre!r} is not known; these are: {', '.join(_PRE_TOKENIZERS)}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        BPE({token: number for number, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(name: str) -> str | None:
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None

    config = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
