"""The official `openai` client against a running cluster."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

PROMPT = "Here is the English alphabet: A B C D"


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(client: openai.OpenAI, cluster: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == cluster.model
    assert client.models.retrieve(cluster.model).id == cluster.model


def test_completion(client: openai.OpenAI, cluster: Any) -> None:
    answer = client.completions.create(model=cluster.model, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.choices[0].text.strip().startswith("E")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_chat(client: openai.OpenAI, cluster: Any) -> None:
    answer = client.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_completion_tokens=32,
    )
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None


def test_chat_stream(client: openai.OpenAI, cluster: Any) -> None:
    asked: dict[str, Any] = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_stream_of_the_async_client(cluster: Any) -> None:
    async def tell(number: int) -> str:
        stream = await client.completions.create(
            model=cluster.model, prompt=f"{number} plus one is", max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        return await asyncio.gather(*(tell(number) for number in range(4)))

    client = openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=120)
    texts = asyncio.run(main())
    assert all(texts)


def test_logprobs(client: openai.OpenAI, cluster: Any) -> None:
    chat = client.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)  # greedy
    plain = client.completions.create(model=cluster.model, prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == plain.choices[0].text


def test_two_choices(client: openai.OpenAI, cluster: Any) -> None:
    asked: dict[str, Any] = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 16, "n": 2, "seed": 11}
    answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text != answer.choices[1].text
    assert [c.text for c in client.completions.create(**asked).choices] == [c.text for c in answer.choices]


def test_stop(client: openai.OpenAI, cluster: Any) -> None:
    asked: dict[str, Any] = {"model": cluster.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    free = client.completions.create(**asked).choices[0].text
    answer = client.completions.create(stop=["H I"], **asked)
    assert answer.choices[0].text == free[: free.index("H I")]
    assert answer.choices[0].finish_reason == "stop"


def test_errors(client: openai.OpenAI, cluster: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=cluster.model, prompt=PROMPT, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert tools.value.param == "tools"


def test_a_stream_that_is_closed_stops_the_work(client: openai.OpenAI, cluster: Any) -> None:
    stream = client.completions.create(
        model=cluster.model, prompt=PROMPT, max_tokens=2000, n=8, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    cluster.wait_idle()
