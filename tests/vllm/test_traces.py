"""A real vLLM's own span is part of our trace."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.otlp_collector import collector, tree
from tests.support.up import pointsman_up
from tests.support.vllm import ANSWER_SECONDS_MAX, VERDICT_SECONDS_MAX, booted

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "vllm"}


def test_what_vllm_says_of_a_request_hangs_on_our_span_of_the_engine(
    vllm_home: EngineHome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell_what_was_measured: Callable[[str], None],
) -> None:
    with collector(tmp_path) as traces:
        endpoint = f"{traces.url}/v1/traces"
        with (
            booted(vllm_home, "--otlp-traces-endpoint", endpoint, directory=tmp_path, environment=HTTP) as engine,
            monkeypatch.context() as patched,
        ):
            patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", traces.url)
            with pointsman_up(tmp_path, "--engine", engine.address) as up:
                up.wait_for("Stop +Ctrl-C", VERDICT_SECONDS_MAX)
                body = {
                    "model": "smollm2-135m",
                    "messages": [{"role": "user", "content": "Say hello."}],
                    "max_tokens": 8,
                }
                request = urllib.request.Request(
                    f"{up.url}/v1/chat/completions",
                    json.dumps({**body, "stream": True}).encode(),
                    {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"},
                )
                with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:
                    answer.read()
                spans = traces.trace(TRACE, spans=7)
                up.stop()

    tell_what_was_measured(tree(spans))
    ours = next(span for span in spans if span.name == "chat smollm2-135m")
    theirs = next(span for span in spans if span.name == "llm_request")
    assert (theirs.service, theirs.parent) == ("vllm", ours.id)
    assert theirs.attributes["gen_ai.usage.completion_tokens"] == 8
    assert theirs.attributes["gen_ai.request.id"].endswith(ours.attributes["pointsman.request.id"])
