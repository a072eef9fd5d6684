"""Opens the tracer of a process. In: the standard OTEL_* variables. Out: spans in the background over OTLP (`otlp`), or no
tracer: without an endpoint opentelemetry is not imported."""

import os

import structlog

from pointsman.runtime.tracing import Tracer

log = structlog.get_logger()

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


def open_tracer(service: str, *, instance: str, trusted: bool = True) -> Tracer | None:
    """None unless OTEL_* variables name an endpoint. `trusted`: whether parents decide about sampling. Call it after
    forking. Raises nothing: a process serves without traces."""
    if not _is_on():
        return None
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), PROTOCOL)
    if protocol != PROTOCOL:
        log.warning("traces_off", reason=f"only the protocol {PROTOCOL} is spoken, not {protocol}")
        return None
    try:
        from pointsman.runtime.otlp import OtlpTracer
    except ImportError as error:
        log.warning("traces_off", reason=f"{error}; pip install 'pointsman[traces]'")
        return None
    try:
        return OtlpTracer(service, instance=instance, trusted=trusted)
    except Exception as error:  # noqa: BLE001 - whatever the SDK makes of OTEL_* variables
        log.warning("traces_off", reason=f"the OTEL_* variables are not understood: {error}")
        return None


def _is_on() -> bool:
    environment = os.environ
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    return not disabled and exporter == "otlp" and any(map(environment.get, _ENDPOINTS))
