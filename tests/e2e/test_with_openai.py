"""The official client (`openai` from PyPI) against the machine that the runs before have made, or that is made now.

The model is made, not trained: what it says is random words, so that only form, figures and limits are judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.conftest import Bench
from tests.e2e.test_site import GROUP_VARS, KEY

MODEL = GROUP_VARS["llama_server_alias"]
CONTEXT = int(GROUP_VARS["llama_server_context_per_request"])
SLOTS = int(GROUP_VARS["llama_server_parallel"])
HELLO = [{"role": "user", "content": "Say hello to the sea."}]


@pytest.fixture(scope="module")
def base_url(bench: Bench) -> str:
    """As the run hands it over: the address is not put together here."""
    converged = bench.converge()
    assert converged.status == 0
    [handed_over] = converged.host["hand_over"]
    assert handed_over["context_per_request"] == CONTEXT
    assert KEY not in converged.output
    return str(handed_over["base_url"])


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    # No retries: an error that goes away when asked again is an error here.
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]


def test_chat_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content.strip()
    assert choice.finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_answer_in_pieces_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**asked)
    pieces, usage, reasons = [], None, []
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("key", ["not-the-key-at-all-x", "none", KEY[:-1]])
def test_a_wrong_key_is_401(base_url: str, key: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.chat.completions.create(model=MODEL, messages=HELLO)
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    assert refused.value.status_code == 401
    assert KEY not in str(refused.value)


def test_a_prompt_that_is_too_long_is_refused_and_says_how_long(client: openai.OpenAI) -> None:
    """Not cut off unseen, as other servers do (F16): the client is told, with both figures."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * (CONTEXT + 500)}], max_tokens=8
        )
    assert refused.value.status_code == 400
    assert refused.value.type == "exceed_context_size_error"
    assert str(CONTEXT) in str(refused.value)
    # And it goes on serving.
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4).usage


def test_a_prompt_of_nearly_all_that_was_promised_is_answered(client: openai.OpenAI) -> None:
    counted = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "word " * 100}], max_tokens=1
    ).usage.prompt_tokens
    frame = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ""}], max_tokens=1
    ).usage.prompt_tokens
    words = int((CONTEXT * 0.9 - frame) * 100 / (counted - frame))
    usage = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "word " * words}], max_tokens=8
    ).usage
    assert usage.prompt_tokens > CONTEXT * 0.85
    assert usage.completion_tokens > 0


def test_as_many_at_once_as_promised_and_more_wait(client: openai.OpenAI) -> None:
    def ask(number: int) -> int:
        messages = [{"role": "user", "content": f"Count from {number}."}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
        return int(answer.usage.completion_tokens)

    with ThreadPoolExecutor(3 * SLOTS) as pool:
        assert all(tokens > 0 for tokens in pool.map(ask, range(3 * SLOTS)))


def test_an_address_with_a_doubled_path_is_404_and_not_a_wrong_answer(base_url: str) -> None:
    """E26: the most common mistake in clients' settings."""
    for wrong in (f"{base_url}/v1", f"{base_url}/chat/completions"):
        with (
            openai.OpenAI(base_url=wrong, api_key=KEY, max_retries=0) as mistaken,
            pytest.raises(openai.NotFoundError),
        ):
            mistaken.chat.completions.create(model=MODEL, messages=HELLO)
