"""URLs of media in a request's messages. An engine opens them itself, from inside the network, so clients with keys may
name only `data:` URLs and hosts that the operator allows."""

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pointsman_ingress.http.errors import ApiError, bad_request
from pointsman_ingress.http.json_form import check_form
from pointsman_ingress.http.request_headers import cleaned
from pointsman_ingress.prompt.body_fields import NULL, field_not_allowed

MEDIA = frozenset({"image_url", "video_url", "audio_url", "file_url", "image", "video", "audio", "input_audio", "file"})
TENSORS = frozenset({"image_embeds", "video_embeds", "audio_embeds", "prompt_embeds"})
"""Parts that an engine unpickles or computes with as they are."""
URL = "url"
NESTED = frozenset({"content", "output", "source", "messages"})
_ODD = frozenset(" @\\")
"""Characters that URL parsers read differently."""


class _Messages(msgspec.Struct):
    messages: msgspec.Raw = NULL
    system: msgspec.Raw = NULL
    input: msgspec.Raw = NULL
    previous_input_messages: msgspec.Raw = NULL
    query: msgspec.Raw = NULL
    queries: msgspec.Raw = NULL
    documents: msgspec.Raw = NULL
    items: msgspec.Raw = NULL
    text_1: msgspec.Raw = NULL
    text_2: msgspec.Raw = NULL
    data_1: msgspec.Raw = NULL
    data_2: msgspec.Raw = NULL


_decode = msgspec.json.Decoder(_Messages).decode
_any = msgspec.json.Decoder().decode


class MediaRules:
    def __init__(self, *, trusted: bool, hosts: Collection[str] = (), allowed: Collection[str] = ()) -> None:
        """`trusted`: clients are the operator's own, and may name any URL unless there are `hosts`. A host may begin
        with `*.`. `allowed`: of TENSORS, by the operator."""
        self._refused = frozenset() if trusted else TENSORS - frozenset(allowed)
        self._open = trusted and not hosts
        self._trusted = trusted
        self._hosts = tuple(host.lower() for host in hosts)

    def check(self, body: bytes) -> None:
        """`body`: a valid JSON object. Raises ApiError."""
        if self._open or body.find(b"{", body.find(b"{") + 1) < 0:  # no object in the object
            return
        found = _decode(body)
        for name in _Messages.__struct_fields__:
            value = bytes(getattr(found, name))
            if b"{" not in value:  # there may be a million ids in it
                continue
            check_form(value)
            for part in _parts(_any(value)):
                self._check_part(part)

    def _check_part(self, part: dict[str, Any]) -> None:
        for name in self._refused & part.keys():
            raise field_not_allowed(name)
        for name in MEDIA & part.keys():
            for url in _urls(part[name]):
                if not self._allows(url):
                    raise _not_allowed(name)
        if part.get("type") == URL and not all(map(self._allows, _urls(part))):
            raise _not_allowed(URL)
        if not self._trusted and part.get("uuid") is not None and MEDIA & part.keys():
            msg = (
                "`uuid` of an image, audio or video may not be sent here: by it an engine would find what others sent."
            )
            raise bad_request(msg, param="uuid", code="field_not_allowed")

    def _allows(self, url: str) -> bool:
        if url[:5].lower() == "data:":
            return True
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").lower()
        except ValueError:
            return False
        plain = url.isascii() and url.isprintable() and not _ODD & set(url)
        return plain and parts.scheme in ("http", "https") and any(_matches(host, one) for one in self._hosts)


def _matches(host: str, allowed: str) -> bool:
    return fnmatchcase(host, allowed) if allowed.startswith("*.") else host == allowed


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """Every content part in `node`. Arguments of tools are not parts."""
    if isinstance(node, list):
        for item in node:
            if isinstance(item, list | dict):
                yield from _parts(item)
    elif isinstance(node, dict):
        yield node
        for name in NESTED & node.keys():
            yield from _parts(node[name])


def _urls(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (url for name in (URL, "file_url") if isinstance(url := value.get(name), str))


def _not_allowed(name: str) -> ApiError:
    shown = cleaned(name)
    message = (
        f"`{shown}` names a URL that may not be opened from here. Send the content itself as a data: URL, or ask the "
        "operator to allow its host."
    )
    return bad_request(message, param=shown, code="media_url_not_allowed")
