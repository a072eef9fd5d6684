"""Multipart forms of the audio endpoints: parses the few fields that routing needs, within bounds."""

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pointsman_ingress.http.errors import bad_request

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of each malformed form

PARTS_MAX = 64
FIELD_BYTES_MAX = 1024
PARAMETERS_MAX = 16
"""Of a header: parsing takes the square of their number."""
_NAMES = re.compile(rb";[ \t]*name([ \t*0-9]*)=", re.IGNORECASE)

FILE = b"file"
READ_FIELDS = frozenset({b"model", b"stream", b"user"})


@dataclass(slots=True)
class AudioForm:
    model: str = ""
    stream: bool = False
    user: str = ""
    file_bytes: int = 0
    names: frozenset[str] = frozenset()


def read_form(body: bytes, content_type: bytes) -> AudioForm:
    """Raises ApiError."""
    few = content_type.count(b";") <= PARAMETERS_MAX
    kind, options = parse_options_header(content_type) if few else (b"", {})
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        msg = "The body must be multipart/form-data, and its content-type must name the boundary."
        raise bad_request(msg, code="invalid_body")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise bad_request("The body is not valid multipart/form-data.", code="malformed_body") from error
    if not reader.ended:
        msg = "The body is not valid multipart/form-data: it ends before its last boundary."
        raise bad_request(msg, code="malformed_body")
    values = {name: value.decode(errors="replace") for name, value in reader.fields.items()}
    streams = values.get(b"stream", "").strip().lower() in ("true", "1", "yes", "on", "t", "y")
    names = frozenset(name.decode("latin-1") for name in reader.names)
    return AudioForm(values.get(b"model", ""), streams, values.get(b"user", ""), reader.file_bytes, names)


class _Reader:
    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}
        self.names: set[bytes] = set()
        self.file_bytes = 0
        self.ended = False
        self._parts = 0
        self._named = False
        self._name = self._header = self._value = b""

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_begin": self._on_header_begin,
            "on_header_field": self._on_header_name,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_part_data,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._parts += 1
        self._name, self._named = b"", False
        if self._parts > PARTS_MAX:
            raise bad_request(f"The form has more than {PARTS_MAX} parts.", code="invalid_body")

    def _on_header_begin(self) -> None:
        self._header = self._value = b""

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._check_disposition()
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"")
            self.names.add(self._name)
            if self._name in READ_FIELDS:
                self.fields[self._name] = b""

    def _check_disposition(self) -> None:
        """Every parser must read the same name: forms of some have `name*`, or the last of several. Raises ApiError."""
        names = _NAMES.findall(self._value)
        one = not self._named and len(names) == 1 and not names[0].strip()
        if not one or self._value.count(b";") > PARAMETERS_MAX:
            msg = "Each part of the form must have one Content-Disposition with one plain name and few parameters."
            raise bad_request(msg, code="invalid_body")
        self._named = True

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self.file_bytes += end - start
        elif self._name in READ_FIELDS:
            self.fields[self._name] += data[start:end]
            if len(self.fields[self._name]) > FIELD_BYTES_MAX:
                msg = f"`{self._name.decode()}` is longer than {FIELD_BYTES_MAX} bytes."
                raise bad_request(msg, param=self._name.decode())

    def _on_end(self) -> None:
        self.ended = True
