"""A model that makes vectors beside one that chats, each in a pool of its own behind one address. vLLM makes an embedding
model of any causal one, so the same small checkpoint serves for both."""

import math
from collections.abc import Iterator, Sequence

import openai
import pytest
from openai import OpenAI

from tests.support.up import pointsman_up
from tests.support.vllm import BLOCK_TOKENS, VERDICT_SECONDS_MAX, RealFleet, RunningEngine
from tests.vllm.conftest import BootEngine

VECTORS = "smollm2-vectors"
TEXTS = ["The fox met seven hens.", "Interest rates fell in June.", "The fox met seven hens."]
VECTOR_LENGTH = 576


@pytest.fixture(scope="module")
def engine(boot_engine: BootEngine) -> Iterator[RunningEngine]:
    with boot_engine("--runner", "pooling", "--convert", "embed", served_model=VECTORS) as running:
        yield running


@pytest.fixture(scope="module")
def client(engine: RunningEngine, real_fleet: RealFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Of a fleet with both models. Embeddings are placed by load, so nobody need know that engine's cache."""
    chats = real_fleet.engines[0].address
    told = ("--engine", chats, "--also", f"{VECTORS}={engine.url}", "--block-tokens", str(BLOCK_TOKENS))
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *told) as up:
        up.wait_for("✓ engine-1 .*: the keys of a chat agree", VERDICT_SECONDS_MAX)
        with OpenAI(base_url=up.url + "/v1", api_key="unused", max_retries=0, timeout=120) as opened:
            yield opened


def test_texts_become_the_vectors_that_the_engine_makes_of_them(client: OpenAI, engine: RunningEngine) -> None:
    raw = client.embeddings.with_raw_response.create(model=VECTORS, input=TEXTS)
    made = raw.parse()
    vectors = [item.embedding for item in made.data]
    directly = engine.ask("/v1/embeddings", {"model": VECTORS, "input": TEXTS})

    assert raw.headers["x-pointsman-instance"] == f"{VECTORS}-engine-1"
    assert raw.headers["x-pointsman-prefix"] == "none; not looked at"
    assert [len(vector) for vector in vectors] == [VECTOR_LENGTH] * 3
    assert made.usage.prompt_tokens == directly["usage"]["prompt_tokens"] > 0
    for vector, expected in zip(vectors, directly["data"], strict=True):
        assert likeness(vector, expected["embedding"]) > 0.999
    assert likeness(vectors[0], vectors[2]) > 0.999 > likeness(vectors[0], vectors[1])


def test_tokens_become_the_vector_of_their_text(client: OpenAI, engine: RunningEngine) -> None:
    tokens = engine.ask("/tokenize", {"model": VECTORS, "prompt": TEXTS[0]})["tokens"]
    one, other = (
        client.embeddings.create(model=VECTORS, input=given).data[0].embedding for given in (TEXTS[0], tokens)
    )

    assert likeness(one, other) > 0.999


def test_each_model_has_its_own_endpoints_and_refuses_those_of_the_other(client: OpenAI, real_fleet: RealFleet) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.with_raw_response.create(model=real_fleet.model, messages=asked, max_tokens=4)  # type: ignore[arg-type]

    assert answer.headers["x-pointsman-instance"] == "engine-1"
    assert {model.id for model in client.models.list()} == {real_fleet.model, VECTORS}
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.chat.completions.create(model=VECTORS, messages=asked)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model=real_fleet.model, input=TEXTS)


def test_what_the_engine_cannot_do_it_says_itself(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Matryoshka"):
        client.embeddings.create(model=VECTORS, input=TEXTS, dimensions=8)


def likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors."""
    product: float = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.hypot(*one) / math.hypot(*other)
