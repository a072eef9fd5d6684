"""What the ingress reads out of a form with a file, and what it refuses."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.prompt.audio_form import FIELD_BYTES_MAX, PARTS_MAX, AudioForm, read_form

BOUNDARY = "xYzZY"
KIND = f"multipart/form-data; boundary={BOUNDARY}".encode()
SOUND = b"RIFF\r\n--xYzZ\r\n\x00\xff" * 50


def part(name: str, value: bytes, *, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part("file", SOUND, more='; filename="a.wav"\r\nContent-Type: audio/wav')


def test_the_small_fields_are_read_at_any_position() -> None:
    body = form(
        FILE, part("model", b"whisper"), part("temperature", b"0"), part("stream", b"true"), part("user", b"bob")
    )

    names = frozenset({"file", "model", "temperature", "stream", "user"})
    assert read_form(body, KIND) == AudioForm("whisper", True, "bob", len(SOUND), names)


@pytest.mark.parametrize(
    ("value", "streams"), [(b"true", True), (b"True", True), (b"1", True), (b"false", False), (b"", False)]
)
def test_whether_to_stream_is_read_as_the_engine_reads_it(value: bytes, streams: bool) -> None:
    assert read_form(form(part("stream", value)), KIND).stream is streams


def test_the_last_of_duplicate_fields_counts() -> None:
    assert read_form(form(part("model", b"one"), part("model", b"two")), KIND).model == "two"


@pytest.mark.parametrize(
    "kind",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=" + b"x" * 300,
        b"text/plain; boundary=x",
    ],
)
def test_a_body_with_another_content_type_is_refused(kind: bytes) -> None:
    assert refusal(form(FILE), kind) == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        form(FILE)[:-8],
        form(FILE)[:100],
        form(FILE).replace(b"form-data; name", b"form-data\x00 name").replace(b"--xYzZY\r\n", b"--xYzZ\r\n", 1),
        form(part("model", b"x" * (FIELD_BYTES_MAX + 1))),
        form(*[part("x", b"")] * (PARTS_MAX + 1)),
        form(part("x", b"", more="\r\nX-Y: " + "z" * 100_000)),
    ],
)
def test_a_malformed_or_oversized_form_is_refused(body: bytes) -> None:
    assert refusal(body, KIND) == 400


@given(
    st.binary(max_size=300)
    | st.lists(
        st.sampled_from([b"--xYzZY", b"\r\n", b"--", b"a: b", b'content-disposition: form-data; name="model"']),
        max_size=20,
    ).map(b"".join)
)
def test_any_body_is_read_or_refused(body: bytes) -> None:
    assert refusal(body, KIND) in (0, 400)


@given(st.binary(max_size=300))
def test_any_content_type_is_read_or_refused(kind: bytes) -> None:
    assert refusal(form(FILE), re.sub(rb"[\r\n]", b"", b"multipart/form-data" + kind)) in (0, 400)


def refusal(body: bytes, kind: bytes) -> int:
    """Its status; 0 where it is none."""
    try:
        read_form(body, kind)
    except ApiError as refused:
        return refused.status
    return 0


@pytest.mark.parametrize(
    "disposition",
    [
        "form-data; name=file; name=model",
        "form-data; name=file; name*=utf-8''vllm_xargs",
        "form-data; name*0=vllm; name*1=_xargs",
        "form-data; NAME=vllm_xargs; name=file",
        "form-data; name=file\r\nContent-Disposition: form-data; name=model",
        "form-data",
        "form-data; name=file" + ";" * 4000,
    ],
)
def test_a_part_whose_name_parsers_may_read_differently_is_refused(disposition: str) -> None:
    strange = f"--{BOUNDARY}\r\nContent-Disposition: {disposition}\r\n\r\nx\r\n".encode()
    with pytest.raises(ApiError) as caught:
        read_form(form(strange), KIND)
    assert (caught.value.status, caught.value.code) == (400, "invalid_body")


def test_a_file_may_have_any_name() -> None:
    names = "filename=\"a.wav\"; filename*=UTF-8''%e2%82%ac.wav"
    assert read_form(form(part("file", SOUND, more=f"; {names}")), KIND).file_bytes == len(SOUND)


def test_a_content_type_of_many_parameters_is_refused_unread() -> None:
    with pytest.raises(ApiError):
        read_form(form(FILE), b"multipart/form-data" + b";" * 30_000 + KIND.removeprefix(b"multipart/form-data"))
