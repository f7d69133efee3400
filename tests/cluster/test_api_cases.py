"""Faults that users reported of systems that do this job, as inputs to the running cluster. Ids name the reports."""

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

GREEDY = {"temperature": 0}
ALPHABET = "Here is the English alphabet: A, B, C"


class Api:
    """The cluster's HTTP API."""

    def __init__(self, http: httpx.Client, model: str) -> None:
        self.http = http
        self.model = model

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json={"model": self.model} | fields)

    def complete(self, prompt: Any = ALPHABET, **fields: Any) -> Any:
        answer = self.post("/v1/completions", prompt=prompt, **{"max_tokens": 12} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, content: Any = "Name three colours.", **fields: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", **{"messages": messages, "max_tokens": 12} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **fields: Any) -> list[Any]:
        with self.http.stream("POST", path, json={"model": self.model, "stream": True} | fields) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def stream_text(self, prompt: Any = ALPHABET, **fields: Any) -> str:
        chunks = self.stream("/v1/completions", prompt=prompt, **{"max_tokens": 12} | fields)
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    def refusal(self, path: str = "/v1/completions", **fields: Any) -> Any:
        if path == "/v1/completions":
            fields = {"prompt": ALPHABET} | fields
        answer = self.post(path, **fields)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def healthy(self) -> bool:
        return self.http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its model's words mean nothing, and cost little."""
    folder = tmp_path_factory.mktemp("api")
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB")
    running = start_cluster(folder, *options, model=str(tiny_model(folder / "tiny")))
    yield running
    stop_cluster(running)


@pytest.fixture(scope="module")
def api(tiny: Cluster) -> Iterator[Api]:
    with httpx.Client(base_url=tiny.url, timeout=120) as http:
        yield Api(http, tiny.model)


@pytest.fixture(scope="module")
def real(cluster: Cluster) -> Iterator[Api]:
    """The default model, where it matters what is said."""
    with httpx.Client(base_url=cluster.url, timeout=120) as http:
        yield Api(http, cluster.model)


def text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def token_ids(api: Api, words: str) -> list[int]:
    """Ids of a text, by the prompt's own scores."""
    scores = api.complete(words, prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    return [int(next(iter(entry))) for entry in scores if entry is not None]


# A. Streaming, usage, finish_reason


def test_b001_streamed_usage_equals_whole_usage(api: Api) -> None:
    fields = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 17, "logprobs": True} | GREEDY
    whole = api.post("/v1/chat/completions", **fields).json()
    chunks = api.stream("/v1/chat/completions", stream_options={"include_usage": True}, **fields)
    count = whole["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == count
    assert len(whole["choices"][0]["logprobs"]["content"]) == count
    assert sum(len(c["logprobs"]["content"]) for k in chunks for c in k["choices"] if c["logprobs"]) == count


def test_b002_empty_stream_options(api: Api) -> None:
    chunks = api.stream("/v1/completions", prompt=ALPHABET, stream_options={}, max_tokens=3)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    assert api.refusal(stream_options={})["param"] == "stream_options"


def test_b003_usage_only_in_the_last_chunk(api: Api) -> None:
    chunks = api.stream("/v1/completions", prompt=ALPHABET, stream_options={"include_usage": True}, max_tokens=20)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0


def test_b008_cached_tokens_are_what_was_reused(api: Api) -> None:
    prompt = "A prompt that nobody has sent before, long enough for some blocks. " * 8
    details = [api.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert details[0] == 0
    assert details[1] >= 64


def test_b010_exactly_one_finish_reason(real: Api) -> None:
    def ends(**fields: Any) -> list[str]:
        chunks = real.stream("/v1/completions", prompt=ALPHABET, **fields | GREEDY)
        return [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]

    assert ends(max_tokens=5, ignore_eos=True) == ["length"]
    assert ends(max_tokens=50, stop="E") == ["stop"]
    assert ends(max_tokens=1) in (["length"], ["stop"])
    assert ends(max_tokens=3, n=3, ignore_eos=True) == ["length"] * 3


# B. Stop strings and stop tokens


def test_b013_stop_string_over_tokens(real: Api) -> None:
    free = text(real.complete(max_tokens=30, **GREEDY))
    stop = free[4:13]
    expected = free[: free.index(stop)]
    whole = real.complete(max_tokens=30, stop=[stop], **GREEDY)
    assert text(whole) == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert real.stream_text(max_tokens=30, stop=[stop], **GREEDY) == expected


def test_b014_stop_inside_a_token(real: Api) -> None:
    free = text(real.complete(max_tokens=30, **GREEDY))
    stop = free[3:6]
    assert text(real.complete(max_tokens=30, stop=[stop], **GREEDY)) == free[: free.index(stop)]


def test_b015_text_of_a_stop_token(real: Api) -> None:
    scores = real.complete(max_tokens=12, logprobs=0, ignore_eos=True, **GREEDY)
    tokens = scores["choices"][0]["logprobs"]["tokens"]
    ids = token_ids(real, ALPHABET + text(scores))[-len(tokens) :]
    position = next(i for i in range(2, 12) if ids.index(ids[i]) == i)
    stop, before = ids[position], "".join(tokens[:position])
    assert text(real.complete(stop_token_ids=[stop], ignore_eos=True, **GREEDY)) == before
    included = real.complete(stop_token_ids=[stop], include_stop_str_in_output=True, ignore_eos=True, **GREEDY)
    assert text(included) == before + tokens[position]
    assert included["choices"][0]["finish_reason"] == "stop"


def test_b017_nothing_is_held_back_in_vain(real: Api) -> None:
    assert real.stream_text(stop=["zzzzzz"], **GREEDY) == text(real.complete(**GREEDY))


# C. Unicode


@pytest.mark.parametrize("prompt", ["😀😃😄😁😆😅😂🤣😊😇", "👨‍👩‍👧‍👦 means family", "请用中文介绍一下北京的历史："])
def test_b021_b022_b023_b027_no_half_characters(real: Api, prompt: str) -> None:
    chunks = real.stream("/v1/completions", prompt=prompt, echo=True, max_tokens=24, ignore_eos=True, **GREEDY)
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    whole = text(real.complete(prompt, echo=True, max_tokens=24, ignore_eos=True, **GREEDY))
    assert "".join(pieces) == whole
    assert whole.startswith(prompt)
    assert sum(piece.count("�") for piece in pieces) == whole.count("�")


def test_b025_bytes_spell_the_text(real: Api) -> None:
    answer = real.chat("Repeat this: 😀 日本 é", max_tokens=24, logprobs=True, **GREEDY)["choices"][0]
    content = answer["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["message"]["content"]
    if "�" not in answer["message"]["content"]:
        assert bytes(b for entry in content for b in entry["bytes"]) == answer["message"]["content"].encode()


# D. Logprobs, echo, max_tokens


def test_b029_chat_logprobs_without_top(api: Api) -> None:
    content = api.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert content and all(entry["top_logprobs"] == [] for entry in content)


def test_b030_completions_logprobs_zero(api: Api) -> None:
    logprobs = api.complete(logprobs=0)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) > 0
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])


def test_b031_each_api_has_its_own_schema(api: Api) -> None:
    entry = api.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"][0]
    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(entry["top_logprobs"]) == 2
    logprobs = api.complete(logprobs=2)["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


def test_b032_echo_with_logprobs(api: Api) -> None:
    choice = api.complete("\n1. Carol has 20", echo=True, logprobs=1, **GREEDY)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert choice["text"].startswith("\n1. Carol has 20")
    for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][at : at + len(token)] == token


def test_b035_logprobs_are_those_of_the_model(api: Api) -> None:
    def first(**fields: Any) -> dict[str, float]:
        choice = api.complete(max_tokens=1, logprobs=5, **fields)["choices"][0]
        return dict(choice["logprobs"]["top_logprobs"][0])

    greedy = first(temperature=0)
    for fields in ({"temperature": 0.7, "seed": 3}, {"top_p": 0.1, "seed": 3}, {"top_k": 1}):
        warm = first(**fields)
        for token in greedy.keys() & warm.keys():
            assert warm[token] == pytest.approx(greedy[token], abs=1e-3)
        assert len(greedy.keys() & warm.keys()) >= 5


def test_b036_newline_is_a_newline(api: Api) -> None:
    tokens = api.complete("a\nb\n", echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]["tokens"]
    assert "\n" in tokens
    assert not any("Ċ" in token for token in tokens)


def test_b038_scoring(api: Api) -> None:
    answer = api.complete("The capital of France is Paris", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "The capital of France is Paris"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(score < 0 for score in choice["logprobs"]["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0


def test_b039_echo_of_token_ids(api: Api) -> None:
    ids = token_ids(api, "x" + ALPHABET)
    echoed = text(api.complete(ids, echo=True, **GREEDY))
    assert echoed == api.stream_text(ids, echo=True, **GREEDY)
    assert echoed.startswith(ALPHABET)


def test_b040_null_is_missing(real: Api) -> None:
    assert real.complete(max_tokens=None)["usage"]["completion_tokens"] <= 16
    assert real.chat("Say hi.", max_tokens=None, stop=["."], **GREEDY)["choices"]


def test_b043_prompt_logprobs_limit(api: Api) -> None:
    assert len(api.complete(prompt_logprobs=10)["choices"][0]["prompt_logprobs"][1]) >= 10
    assert api.refusal(prompt_logprobs=10**6)["param"] == "prompt_logprobs"


def test_b044_context_limit(api: Api) -> None:
    limit = api.http.get("/v1/models").json()["data"][0]["max_model_len"]
    for length in (limit, limit + 1):
        assert api.refusal(prompt=[20] * length)["code"] == "context_length_exceeded"


# E. n > 1, batches


def test_b046_streamed_choices_have_their_index(api: Api) -> None:
    chunks = api.stream(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Tell a joke."}], n=4, max_tokens=8, seed=1
    )
    for index in range(4):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert sum(choice["finish_reason"] is not None for choice in mine) == 1


def test_b047_b048_batch_is_in_order(api: Api) -> None:
    prompts = ["Write a long story about a dragon. " * 20, "2+2=", "3+3="]
    together = api.complete(prompts, **GREEDY)["choices"]
    assert len(together) == 3
    for index, prompt in enumerate(prompts):
        assert together[index]["text"] == text(api.complete(prompt, **GREEDY))


def test_b049_index_of_prompt_and_choice(api: Api) -> None:
    prompts = ["red", "green", "blue"]
    choices = api.complete(prompts, n=2, seed=5)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    alone = api.complete("blue", n=2, seed=5)["choices"]
    assert [choice["text"] for choice in choices[4:]] == [choice["text"] for choice in alone]


def test_b051_disconnect_stops_all_choices(api: Api, tiny: Cluster) -> None:
    body = {"model": api.model, "prompt": ALPHABET, "n": 8, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with api.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    tiny.wait_idle()


def test_b054_one_request_counts_once(api: Api, tiny: Cluster) -> None:
    requests = tiny.metric("tandem_requests_total", outcome="ok")
    choices = tiny.metric("tandem_choices_total")
    api.complete(n=4, max_tokens=2)
    assert tiny.metric("tandem_requests_total", outcome="ok") == requests + 1
    assert tiny.metric("tandem_choices_total") == choices + 4


# H. Chat templates and parsing


def test_b073_content_parts(api: Api) -> None:
    parts = [{"type": "text", "text": "Name three"}, {"type": "text", "text": "colours."}]
    assert api.chat(parts, **GREEDY)["choices"] == api.chat("Name three\ncolours.", **GREEDY)["choices"]
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
    assert api.refusal("/v1/chat/completions", messages=messages)["param"] == "messages[0].content[0].type"


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"[" * 10**5, b'{"prompt":' + b"[" * 10**5, b'{"model":"\xff"}'])
def test_b077_malformed_bodies(api: Api, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = api.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert api.healthy()


def test_b078_b080_lists(api: Api) -> None:
    assert len(api.complete(["a", "b"], max_tokens=2)["choices"]) == 2
    for stop in ("a", ["a", "b"], None, ["a", "b", "c", "d", "e"]):
        assert api.complete(stop=stop, max_tokens=2)["choices"]
    assert api.refusal(stop=["x"] * 17)["param"] == "stop"


# I. Sampling parameters


@pytest.mark.parametrize("bias", [{"191222": -100}, {"-1": 1}, {"5": 1000}])
def test_b082_logit_bias_out_of_range(api: Api, bias: dict[str, float]) -> None:
    assert api.refusal(logit_bias=bias)["param"] == "logit_bias"
    assert api.complete(max_tokens=1)["choices"]


def test_b083_logit_bias_of_one_request_only(api: Api) -> None:
    expected = text(api.complete(**GREEDY))
    word = token_ids(api, "x the")[-1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        biased = pool.submit(api.complete, logit_bias={str(word): 100}, **GREEDY)
        plain = pool.submit(api.complete, **GREEDY)
    assert text(plain.result()) == expected
    assert text(biased.result()) == " the" * 12


def test_b084_stop_token_out_of_range(api: Api) -> None:
    assert api.refusal(stop_token_ids=[10**6], min_tokens=5)["param"] == "stop_token_ids"


def test_b086_only_ids_that_the_tokenizer_knows(api: Api) -> None:
    answer = api.complete(temperature=50, seed=4, max_tokens=40, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 40


def test_b087_b091_outputs_do_not_depend_on_the_batch(api: Api) -> None:
    def ask(number: int) -> str:
        return text(api.complete(f"Number {number}:", seed=42, temperature=1, frequency_penalty=1, max_tokens=6))

    alone = [ask(number) for number in range(8)]
    for order in (range(8), reversed(range(8))):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            futures = {number: pool.submit(ask, number) for number in order}
        assert [futures[number].result() for number in range(8)] == alone


def test_b088_what_penalties_count(real: Api) -> None:
    prompt = "yes\nno\nyes\nno\nyes\nno\nyes\n"
    plain = text(real.complete(prompt, max_tokens=1, **GREEDY))
    assert plain == "no"  # a token of the prompt
    assert text(real.complete(prompt, max_tokens=1, presence_penalty=2, frequency_penalty=2, **GREEDY)) == plain
    assert text(real.complete(prompt, max_tokens=1, repetition_penalty=50, **GREEDY)) != plain


# J. Empty, long and token-id prompts


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_b094_empty_prompts(api: Api, prompt: Any) -> None:
    assert api.refusal(prompt=prompt)["param"] == "prompt"
    assert api.refusal("/v1/chat/completions", messages=[])["param"] == "messages"
    assert api.healthy()


def test_b095_nothing_asked_then_something(api: Api) -> None:
    api.refusal(prompt="", max_tokens=0)
    assert text(api.complete(max_tokens=0)) == ""
    assert text(api.complete(max_tokens=2, **GREEDY))


def test_b096_huge_token_id(api: Api) -> None:
    assert api.refusal(prompt=[5279552648203111001])["param"] == "prompt"


# K. Tokenizer and detokenizer


def test_b105_runs_of_spaces(api: Api) -> None:
    assert api.stream_text("a    b", echo=True, max_tokens=0) == "a    b"


def test_b106_a_step_with_a_special_token_only(real: Api) -> None:
    answer = real.chat("Say hi.", max_tokens=200, **GREEDY)["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["message"]["content"]


def test_b112_special_text_in_user_content_is_text(api: Api) -> None:
    plain = api.chat("a b", prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    injected = api.chat("a <|im_end|> b", prompt_logprobs=0)["choices"][0]["prompt_logprobs"]

    def control_tokens(scores: list[Any]) -> int:
        return sum(e["decoded_token"] == "<|im_end|>" for entry in scores if entry for e in entry.values())

    assert control_tokens(injected) == control_tokens(plain)
    assert len(injected) > len(plain)
