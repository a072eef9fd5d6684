"""Which URLs in a request an engine may open."""

import json
from typing import Any

import pytest

from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.prompt.remote_media import MediaRules

KEYED = MediaRules(trusted=False)
ALLOWING = MediaRules(trusted=False, hosts=["images.example", "*.cdn.example"])
REMOTE = "http://169.254.169.254/latest/meta-data"


def chat(part: dict[str, Any]) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}).encode()


PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": REMOTE}},
    {"image_url": REMOTE},
    {"type": "video_url", "video_url": {"url": REMOTE}},
    {"type": "audio_url", "audio_url": {"url": REMOTE}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "/etc/passwd.png"}},
    {"type": "image_url", "image_url": {"url": " HTTP://10.0.0.1/"}},
    {"type": "image", "image": REMOTE},
    {"type": "image", "source": {"type": "url", "url": REMOTE}},
    {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": REMOTE}}]},
    {"type": "input_image", "image_url": REMOTE},
    {"type": "input_file", "file_url": REMOTE},
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("rules", [KEYED, ALLOWING, MediaRules(trusted=True, hosts=["images.example"])])
def test_a_client_with_a_key_cannot_make_an_engine_open_a_url(part: dict[str, Any], rules: MediaRules) -> None:
    with pytest.raises(ApiError) as caught:
        rules.check(chat(part))
    assert (caught.value.status, caught.value.code) == (400, "media_url_not_allowed")
    assert "169.254" not in caught.value.message


@pytest.mark.parametrize("name", ["image_embeds", "video_embeds", "audio_embeds", "prompt_embeds"])
def test_tensors_in_messages_are_refused_as_those_beside_them(name: str) -> None:
    body = chat({"type": name, name: {"image_embeds": "AAAA"} if name == "image_embeds" else "AAAA"})
    with pytest.raises(ApiError) as caught:
        KEYED.check(body)
    assert (caught.value.code, caught.value.param) == ("field_not_allowed", name)
    MediaRules(trusted=False, allowed=[name]).check(body)
    MediaRules(trusted=True).check(body)


@pytest.mark.parametrize("part", PARTS)
def test_without_keys_and_hosts_the_engine_decides(part: dict[str, Any]) -> None:
    MediaRules(trusted=True).check(chat(part))


def test_an_escape_does_not_hide_a_url() -> None:
    hidden = chat(PARTS[0]).replace(b"image_url", b"im\\u0061ge\\u005furl").replace(b'"url"', b'"\\u0075rl"')
    hidden = hidden.replace(b"://", b":\\u002f/")
    with pytest.raises(ApiError):
        KEYED.check(hidden)


@pytest.mark.parametrize("field", ["messages", "input", "previous_input_messages", "documents", "data_1", "queries"])
def test_every_field_with_messages_is_looked_at(field: str) -> None:
    content = [{"role": "user", "content": [PARTS[0]]}]
    value: Any = {"content": content[0]["content"]} if field == "data_1" else content
    with pytest.raises(ApiError):
        KEYED.check(json.dumps({field: value}).encode())


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": "DATA:image/png;base64,AAAA"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "text", "text": "look at http://169.254.169.254/"},
        {"type": "tool_use", "id": "1", "name": "get", "input": {"url": REMOTE, "image_url": REMOTE}},
    ],
)
def test_content_itself_and_urls_that_nobody_opens_pass(part: dict[str, Any]) -> None:
    KEYED.check(chat(part))


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://images.example/a.png", True),
        ("http://IMAGES.example:8080/a.png", True),
        ("https://a.cdn.example/b", True),
        ("https://cdn.example/b", False),
        ("https://images.example.evil.example/a", False),
        ("https://images.example@evil.example/a", False),
        ("https://evil.example\\@images.example/a", False),
        ("https://evil.example/?images.example", False),
        ("ftp://images.example/a", False),
        ("https://[::1]/a", False),
        ("https://[", False),
    ],
)
def test_hosts_that_the_operator_allows(url: str, allowed: bool) -> None:
    sent = chat({"type": "image_url", "image_url": {"url": url}})
    if allowed:
        ALLOWING.check(sent)
        return
    with pytest.raises(ApiError):
        ALLOWING.check(sent)


def test_a_medium_has_no_name_by_which_others_may_have_sent_it() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "logo"}
    MediaRules(trusted=True).check(chat(part))
    with pytest.raises(ApiError):
        KEYED.check(chat(part))
    with pytest.raises(ApiError):
        KEYED.check(chat({"type": "image_url", "image_url": None, "uuid": "logo"}))
