"""Every bad value of a request is a 400 that names the parameter."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import prompts, validation
from services.gateway.errors import ApiError
from services.gateway.intake import _cache_salt as cache_salt
from services.gateway.openai_types import ChatRequest, CompletionRequest
from services.gateway.validation import Options

VOCABULARY = 1000
CONTEXT = 100
COMPLETION = msgspec.json.Decoder(CompletionRequest)
CHAT = msgspec.json.Decoder(ChatRequest)


def completion(**fields: object) -> Options:
    body = json.dumps({"model": "m", "prompt": "x"} | fields).encode()
    request = validation.decode(body, COMPLETION)
    options = validation.completion_options(request, VOCABULARY)
    prompts.check_prompts(request, options.n, VOCABULARY, CONTEXT)
    return options


def chat(**fields: object) -> Options:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields).encode()
    request = validation.decode(body, CHAT)
    options = validation.chat_options(request, VOCABULARY)
    prompts.check_messages(request, CONTEXT)
    return options


BAD = [
    ("n", 0), ("n", -1), ("n", 10**9), ("n", 1.5), ("n", "2"), ("n", True),
    ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", "8"),
    ("temperature", -0.1), ("temperature", 101), ("temperature", "hot"), ("temperature", [1]),
    ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_k", -2), ("top_k", 2**31), ("min_p", -0.1), ("min_p", 1.1),
    ("repetition_penalty", 0), ("frequency_penalty", 2.1), ("presence_penalty", -2.1),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 0.5),
    ("logit_bias", {"191222": -100}), ("logit_bias", {"-1": 1}), ("logit_bias", {"5": 1000}), ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": "1"}), ("logit_bias", {str(i): 1 for i in range(1025)}), ("logit_bias", []),
    ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 17), ("stop", "a" * 1025), ("stop", 3), ("stop", [3]),
    ("stop_token_ids", [10**6]), ("stop_token_ids", [-1]), ("stop_token_ids", [1] * 257), ("stop_token_ids", 5),
    ("min_tokens", -1), ("min_tokens", 5000), ("prompt_logprobs", 21), ("prompt_logprobs", -1),
    ("priority", 2**31), ("cache_salt", ""), ("cache_salt", "x" * 257), ("stream", "yes"), ("stream", 1),
    ("stream_options", {"include_usage": True}), ("stream_options", []),
    ("best_of", 2), ("response_format", {"type": "json_object"}), ("use_beam_search", True),
]  # fmt: skip


@pytest.mark.parametrize(("param", "value"), BAD, ids=lambda value: str(value)[:20])
def test_bad_values_of_both(param: str, value: object) -> None:
    for check in (completion, chat):
        more = {"max_tokens": 100} if param == "min_tokens" else {}
        with pytest.raises(ApiError) as raised:
            check(**more | {param: value})
        assert raised.value.status == 400
        assert raised.value.detail.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", ""), ("prompt", []), ("prompt", [""]), ("prompt", [[]]), ("prompt", ["a", ""]), ("prompt", None),
        ("prompt", 5), ("prompt", [1, "a"]), ("prompt", ["a", [1]]), ("prompt", [[1, "a"]]), ("prompt", {}),
        ("prompt", [5279552648203111001]), ("prompt", [10**30]), ("prompt", [-1]), ("prompt", [VOCABULARY]),
        ("prompt", [1.5]), ("prompt", ["a"] * 257), ("prompt", "x" * (64 * CONTEXT + 1)),
        ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("suffix", "end"), ("model", None), ("model", 3),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_bad_values_of_completions(param: str, value: object) -> None:
    with pytest.raises(ApiError) as raised:
        completion(**{param: value})
    assert (raised.value.status, raised.value.detail.param) == (400, param)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hello"}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        ("messages", {"messages": [{"content": "x"}]}),
        ("messages[0]", {"messages": [{"role": "tool", "content": "x"}]}),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * (64 * CONTEXT + 1)}]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
        ("logprobs", {"logprobs": 2}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("max_completion_tokens", {"max_completion_tokens": 1, "max_tokens": 2}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("audio", {"audio": {"voice": "x"}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ],
    ids=str,
)
def test_bad_values_of_chat(param: str, fields: dict[str, object]) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    assert (raised.value.status, raised.value.detail.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"[" * 100_000, b'{"z":' + b"[" * 100_000, b'{"model":"\xff"}', b'{"n":NaN}',
     b'{"temperature":1e999}', b'{"model":"m","prompt":"\\ud800"}', b'{"model":"m","prompt":"\\udc00"}'],
    ids=lambda value: repr(value[:20]),
)  # fmt: skip
def test_malformed_bodies(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        request = validation.decode(body, COMPLETION)
        prompts.check_prompts(request, 1, VOCABULARY, CONTEXT)
    assert raised.value.status == 400


def test_null_is_as_if_missing() -> None:
    nulls = {name: None for name in CompletionRequest.__struct_fields__ if name not in ("model", "prompt", "seed")}
    assert completion(seed=1, **nulls) == completion(seed=1)
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name not in ("model", "messages", "seed")}
    assert chat(seed=1, **nulls) == chat(seed=1)


def test_defaults() -> None:
    assert completion().max_tokens == 16
    assert chat().max_tokens is None
    assert completion().sampling.temperature == 1.0
    assert completion().sampling.seed != completion().sampling.seed  # drawn


def test_good_values() -> None:
    assert completion(stop=["a"] * 16).stop == ("a",) * 16
    assert completion(stop="a").stop == ("a",)
    assert completion(logit_bias={"5": -100}).sampling.logit_bias == {5: -100.0}
    assert completion(top_k=-1).sampling.top_k == 0
    assert completion(seed=-1).sampling.seed == 2**64 - 1
    assert completion(logprobs=0).sampling.logprobs == 0
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"]).n == 1
    assert completion(n=2, best_of=2, suffix="", an_unknown_field={"a": [1]}).n == 2
    assert completion(max_tokens=0, echo=True, logprobs=1).sampling.prompt_logprobs == 1
    assert completion(prompt_logprobs=4).prompt_logprobs == 4
    assert not completion(stream=True, stream_options={}).include_usage


def test_prompts_and_messages() -> None:
    def checked(prompt: object) -> list[str | list[int]]:
        request = validation.decode(json.dumps({"model": "m", "prompt": prompt}).encode(), COMPLETION)
        return prompts.check_prompts(request, 1, VOCABULARY, CONTEXT)

    assert checked("a") == ["a"]
    assert checked(["a", "b"]) == ["a", "b"]
    assert checked([1, 2]) == [[1, 2]]
    assert checked([[1], [2, 3]]) == [[1], [2, 3]]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    request = validation.decode(json.dumps({"model": "m", "messages": messages}).encode(), CHAT)
    assert prompts.check_messages(request, CONTEXT) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


def test_many_choices_of_many_prompts_are_refused() -> None:
    with pytest.raises(ApiError) as raised:
        completion(prompt=["a"] * 256, n=5)
    assert raised.value.detail.param == "n"


NAMES = st.one_of(st.text(max_size=4), st.sampled_from(["", "a", "1", "1:a", ":", "0:"]))


@given(a=st.tuples(NAMES, NAMES), b=st.tuples(NAMES, NAMES))
def test_no_tenant_chooses_the_salt_of_another(a: tuple[str, str], b: tuple[str, str]) -> None:
    """A tenant's name and what it chooses cannot be cut in another place to be another's."""
    assert (cache_salt(*a) == cache_salt(*b)) == (a == b)
