"""A collector of traces as a process: OTLP over HTTP/protobuf in, one JSON line per span out. The official collector is
in no registry that tests may use. It may hang or refuse, as a collector in trouble does."""

import gzip
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from typing_extensions import override

from pointsman.adapters.child_process import die_with_parent

KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
ERROR = 2
SPANS_SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    service: str
    began: int
    ended: int
    failed: bool
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sequences(self) -> dict[str, int]:
        """Of the log's events, by type."""
        key = "pointsman.log.sequence"
        return {event["name"]: event["attributes"][key] for event in self.events if key in event["attributes"]}


@dataclass(frozen=True, slots=True)
class Collector:
    url: str
    out: Path
    pid: int

    def spans(self) -> list[CollectedSpan]:
        return [CollectedSpan(**json.loads(line)) for line in self.out.read_text().splitlines()]

    def until(self, enough: Callable[[list[CollectedSpan]], bool]) -> list[CollectedSpan]:
        deadline = time.monotonic() + SPANS_SECONDS_MAX
        while not enough(spans := self.spans()):
            assert time.monotonic() < deadline, [(s.service, s.name, s.trace) for s in spans]
            time.sleep(0.05)
        return spans

    def trace(self, trace: str, *, spans: int) -> list[CollectedSpan]:
        """All spans of a trace once there are that many, the earliest first."""
        found = self.until(lambda all_: sum(span.trace == trace for span in all_) >= spans)
        return sorted((span for span in found if span.trace == trace), key=lambda span: span.began)


@contextmanager
def collector(directory: Path, manner: str = "takes") -> Iterator[Collector]:
    """`manner`: "takes", "hangs" (never answers) or "refuses" (503)."""
    out = directory / "spans.jsonl"
    out.touch()
    process = subprocess.Popen(
        [sys.executable, __file__, str(out), manner],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    assert process.stdout is not None
    try:
        yield Collector(f"http://127.0.0.1:{int(process.stdout.readline())}", out, process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def tree(spans: list[CollectedSpan]) -> str:
    """For people: one line a span, children below their parents."""
    ids = {span.id for span in spans}
    began = min(span.began for span in spans)

    def lines(parent: str, depth: int) -> Iterator[str]:
        for span in spans:
            if span.parent == parent or (not depth and span.parent not in ids and parent == ""):
                at, took = (span.began - began) / 1e6, (span.ended - span.began) / 1e6
                logged = ", ".join(f"{name} {sequence}" for name, sequence in span.sequences.items())
                label = "  " * depth + f"{span.service}: {span.name}"
                yield f"{label:58s} {at:8.1f} ms  {took:8.1f} ms  {logged}".rstrip()
                yield from lines(span.id, depth + 1)

    return "\n".join(lines("", 0))


def decoded(body: bytes) -> Iterator[dict[str, Any]]:
    """Raises google.protobuf.message.DecodeError."""
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "name": span.name,
                    "kind": KINDS[span.kind],
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "service": service,
                    "began": span.start_time_unix_nano,
                    "ended": span.end_time_unix_nano,
                    "failed": span.status.code == ERROR,
                    "attributes": _attributes(span.attributes),
                    "events": [
                        {"name": event.name, "at": event.time_unix_nano, "attributes": _attributes(event.attributes)}
                        for event in span.events
                    ],
                }


def _attributes(pairs: Any) -> dict[str, Any]:
    def value(each: AnyValue) -> Any:
        kind = each.WhichOneof("value")
        if kind == "array_value":
            return [value(one) for one in each.array_value.values]
        return getattr(each, kind) if kind else None

    named: list[KeyValue] = list(pairs)
    return {pair.key: value(pair.value) for pair in named}


def _serve(out: Path, manner: str) -> None:
    writing = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if manner == "hangs":
                threading.Event().wait()
            known = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if known and manner == "takes":
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                lines = "".join(json.dumps(span) + "\n" for span in decoded(body))
                with writing, out.open("a") as file:
                    file.write(lines)
            self.send_response(200 if known and manner == "takes" else 503 if known else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        @override
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
