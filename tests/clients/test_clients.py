"""Clients as people use them, against the ingress in front of simulated engines."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pointsman_cli.discovery import FleetFile
from tests.clients.conftest import Client, run

LANGCHAIN = Path(__file__).parent / "langchain_chat.py"
REQUESTS = 40


@pytest.fixture
def curl(tmp_path: Path) -> Client:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("no curl on this machine")
    return lambda *arguments: run(program, "-sS", *arguments, within=tmp_path)


def body(**fields: Any) -> tuple[str, ...]:
    asks = {"model": "pointsman-sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3} | fields
    return "-H", "content-type: application/json", "-d", json.dumps(asks)


def test_curl_gets_an_answer_a_stream_and_an_error(curl: Client, fleet: FleetFile) -> None:
    path = f"{fleet.ingress}/v1/chat/completions"
    answer = json.loads(curl(path, *body()))
    stream = curl("-N", path, *body(stream=True))
    refusal = curl("-o", "error.json", "-w", "%{http_code} %header{x-request-id}", path, *body(model="nobody"))

    assert answer["usage"]["completion_tokens"] == 3
    assert stream.count("data: ") > 2
    assert stream.endswith("data: [DONE]\n\n")
    assert refusal.startswith("404 ")
    assert len(refusal) > 5


def test_langchains_chat_model_works(client: Client, fleet: FleetFile) -> None:
    seen = json.loads(client("python", str(LANGCHAIN), f"{fleet.ingress}/v1", "pointsman-sim").splitlines()[-1])

    assert seen["whole"][1]["output_tokens"] == 8
    assert seen["pieces"] >= 8
    assert seen["streamed"][1]["input_token_details"]["cache_read"] > 0, "the second turn finds the first"
    assert all(seen["batch"])
    assert seen["with_tools"]
    assert seen["response"][0] == seen["whole"][0], "the same conversation has the same tokens either way"
    assert int(seen["headers"]["x-pointsman-cached-tokens"]) > 0
    assert seen["vectors"] == [3, True, False]


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_aiperf_measures_the_ingress_as_it_would_an_engine(
    client: Client, fleet: FleetFile, tokenizer_directory: Path, tmp_path: Path, endpoint: str
) -> None:
    client(
        "aiperf", "profile", "--url", fleet.ingress, "--model", "pointsman-sim", "--endpoint-type", endpoint,
        "--streaming", "--tokenizer", str(tokenizer_directory), "--isl", "300", "--osl", "16", "--concurrency", "4",
        "--request-count", str(REQUESTS), "--random-seed", "1", "--ui", "none", "--artifact-dir", str(tmp_path),
    )  # fmt: skip
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())

    assert found["request_count"]["avg"] == REQUESTS
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0
    assert found["time_to_first_token"]["avg"] > 0


@pytest.mark.parametrize(
    ("backend", "path", "model"),
    [
        ("openai-chat", "/v1/chat/completions", "pointsman-sim"),
        ("vllm", "/v1/completions", "poet"),
        ("openai-embeddings", "/v1/embeddings", "coder"),
    ],
)
def test_vllms_own_benchmark_measures_the_ingress_as_it_would_an_engine(
    vllm_client: Client, fleet: FleetFile, tokenizer_directory: Path, backend: str, path: str, model: str
) -> None:
    printed = vllm_client(
        "bench", "serve", "--backend", backend, "--base-url", fleet.ingress, "--endpoint", path, "--model", model,
        "--tokenizer", str(tokenizer_directory), "--dataset-name", "random", "--random-input-len", "256",
        "--random-output-len", "16", "--num-prompts", str(REQUESTS), "--request-rate", "20", "--seed", "1",
    )  # fmt: skip

    assert re.search(rf"Successful requests: +{REQUESTS}\b", printed)
    assert re.search(r"Failed requests: +0\b", printed)
