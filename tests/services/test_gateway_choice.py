"""Token ids to the text, pieces and finish reason that the client is told."""

import subprocess
import sys

import pytest

from engine.request import SamplingParams, TokenLogprob, TokenOutput
from engine.text.tokenizer import Tokenizer
from engine.weights.resolve import resolve
from services.gateway.choice import Choice, Delta
from services.gateway.formats import ChatFormat, CompletionFormat
from services.gateway.validation import Options


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve("SmolLM2-135M-Instruct"))


def options(logprobs: int | None = 1, min_tokens: int = 0, **fields: object) -> Options:
    sampling = SamplingParams(logprobs=logprobs, min_tokens=min_tokens)
    return Options(sampling=sampling, max_tokens=100, **fields)  # type: ignore[arg-type]


def outputs(ids: list[int], finish: str | None = "length", stop_token: int | None = None) -> list[TokenOutput]:
    """One output for each token, as a worker sends them."""
    return [
        TokenOutput(
            request_id="r",
            attempt=0,
            index=index,
            token_ids=[token_id],
            logprobs=[TokenLogprob(token_id, -0.5, [(token_id, -0.5), (7, -2.0)])],
            finish_reason=finish if index == len(ids) - 1 else None,  # type: ignore[arg-type]
            stop_token_id=stop_token if index == len(ids) - 1 else None,
        )
        for index, token_id in enumerate(ids)
    ]


def run(choice: Choice, steps: list[TokenOutput], size: int = 1) -> list[Delta]:
    """The deltas when `size` outputs arrive at a time."""
    deltas = []
    for at in range(0, len(steps), size):
        if choice.finish_reason is None:
            deltas.append(choice.push(steps[at : at + size]))
    return deltas


TEXTS = ["Hello, world.\n  New line", "👨‍👩‍👧‍👦 family 😀😀😀", "日本語のテキスト", "a    b\t\tc", "naïve café"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_pieces_spell_the_text(tokenizer: Tokenizer, text: str, size: int) -> None:
    choice = Choice(0, tokenizer, options(), None)
    ids = tokenizer.encode(text)
    deltas = run(choice, outputs(ids), size)
    assert "".join(delta.text for delta in deltas) == text
    assert not any("�" in delta.text for delta in deltas)
    pieces = [piece for delta in deltas for piece in delta.pieces]
    assert [piece.token_id for piece in pieces] == ids
    assert "".join(piece.text for piece in pieces) == text
    assert b"".join(piece.data for piece in pieces) == text.encode()
    assert choice.num_tokens == len(ids)
    assert choice.finish_reason == "length"
    told = 0
    for delta in deltas:
        told += len(delta.text) - sum(len(piece.text) for piece in delta.pieces)
        assert told >= 0  # no piece before its text


@pytest.mark.parametrize("stop", ["world", "o, w", "lo", "!", "Hello", "😀", "\n"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_stop_strings_cut_text_and_pieces(tokenizer: Tokenizer, stop: str, include: bool, size: int) -> None:
    text = "Hello, world! 😀\nHello again"
    choice = Choice(0, tokenizer, options(stop=(stop,), include_stop=include), None)
    ids = tokenizer.encode(text)
    deltas = run(choice, outputs(ids), size)
    expected = text[: text.index(stop) + (len(stop) if include else 0)]
    assert "".join(delta.text for delta in deltas) == expected
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    pieces = [piece for delta in deltas for piece in delta.pieces]
    assert "".join(piece.text for piece in pieces) == expected
    assert b"".join(piece.data for piece in pieces) == expected.encode()
    assert len(pieces) == choice.num_tokens
    # No fewer tokens than the stop string needs, and no more.
    assert stop in tokenizer.decode(ids[: choice.num_tokens])
    assert stop not in tokenizer.decode(ids[: choice.num_tokens - 1])


def test_only_the_beginning_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, options(stop=("zzzzzz",)), None)
    deltas = run(choice, outputs(tokenizer.encode("</think> and zz top"), finish=None))
    assert "".join(delta.text for delta in deltas) == "</think> and zz top"


def test_what_was_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, options(stop=("top of",)), None)
    deltas = run(choice, outputs(tokenizer.encode("at the top")))
    assert "".join(delta.text for delta in deltas) == "at the top"
    assert "".join(piece.text for delta in deltas for piece in delta.pieces) == "at the top"


def test_min_tokens_holds_for_stop_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two one two one two")
    choice = Choice(0, tokenizer, options(min_tokens=4, stop=("two",)), None)
    deltas = run(choice, outputs(ids))
    assert "".join(delta.text for delta in deltas) == "one two one "
    assert choice.num_tokens == 4


def test_stop_tokens_are_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("up to the")
    steps = outputs(ids, "stop", stop_token=ids[-1])
    assert "".join(d.text for d in run(Choice(0, tokenizer, options(), None), steps)) == "up to"
    assert "".join(d.text for d in run(Choice(0, tokenizer, options(include_stop=True), None), steps)) == "up to the"
    eos = tokenizer.id_of(tokenizer.eos_token)
    assert eos is not None
    choice = Choice(0, tokenizer, options(), None)
    deltas = run(choice, outputs([*ids, eos], "stop", stop_token=eos))
    assert "".join(d.text for d in deltas) == "up to the"
    assert deltas[-1].pieces[-1].text == ""
    assert choice.num_tokens == len(ids) + 1 == sum(len(delta.pieces) for delta in deltas)


def test_a_character_that_is_never_finished(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    choice = Choice(0, tokenizer, options(), None)
    deltas = run(choice, outputs(ids[:-1]))
    assert "".join(delta.text for delta in deltas) == "�"
    assert "".join(piece.text for piece in deltas[-1].pieces) == "�"


def test_echo_goes_first_with_scores(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once upon")
    choice = Choice(0, tokenizer, options(logprobs=2, echo=True), prompt)
    steps = outputs(tokenizer.encode(" a time"))
    steps[0].prompt_logprobs = [None, *(TokenLogprob(token, -1.0, [(token, -1.0)]) for token in prompt[1:])]
    form = CompletionFormat(tokenizer, options(logprobs=2, echo=True))
    chunks = [form.chunk(choice, delta) for delta in run(choice, steps)]
    text = "".join(chunk.text for chunk in chunks)
    assert text == "Once upon a time"
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    tokens = [token for entry in logprobs for token in entry.tokens]
    offsets = [offset for entry in logprobs for offset in entry.text_offset]
    scores = [score for entry in logprobs for score in entry.token_logprobs]
    assert scores[: len(prompt)] == [None] + [-1.0] * (len(prompt) - 1)
    assert "".join(tokens) == text
    assert all(text[at : at + len(token)] == token for token, at in zip(tokens, offsets, strict=True))


def test_chat_logprobs_have_bytes_and_alternatives(tokenizer: Tokenizer) -> None:
    asked = options(logprobs=1)
    choice = Choice(0, tokenizer, asked, None)
    (delta,) = run(choice, outputs(tokenizer.encode("\n😀")), 1000)
    chunk = ChatFormat(tokenizer, asked).chunk(choice, delta)
    assert chunk.logprobs is not None
    assert chunk.logprobs.content[0].token == "\n"
    assert bytes(value for entry in chunk.logprobs.content for value in entry.bytes or []) == "\n😀".encode()
    assert all(len(entry.top_logprobs) == 1 for entry in chunk.logprobs.content)
    none = ChatFormat(tokenizer, options(logprobs=0)).chunk(choice, delta).logprobs
    assert none is not None and none.content[0].top_logprobs == []


def test_tokens_that_are_no_characters_do_not_collide(tokenizer: Tokenizer) -> None:
    asked = options(logprobs=5)
    parts = tokenizer.encode("😀")
    step = outputs(parts)[0]
    step.logprobs = [TokenLogprob(parts[0], -0.1, [(token, -0.1) for token in dict.fromkeys(parts)])]
    step.finish_reason = "length"
    choice = Choice(0, tokenizer, asked, None)
    chunk = CompletionFormat(tokenizer, asked).chunk(choice, choice.push([step]))
    assert chunk.logprobs is not None and chunk.logprobs.top_logprobs[0] is not None
    assert len(chunk.logprobs.top_logprobs[0]) == len(set(parts))


def test_the_process_never_imports_torch() -> None:
    code = (
        "import sys, services.gateway.serve;"
        "bad = {'torch', 'transformers', 'ray'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
