"""What an answer of the public port may be, whatever was asked.

The rule for 5xx: 500 never. 503 only with Retry-After and a code that says what is lacking. 502 only as `engine_failed`,
which is the engine's own fault; the engines of these tests are sound, so that it is counted and bounded.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.security.hostile import Attempt

UNAVAILABLE = frozenset(
    {
        "no_engines",
        "no_place",
        "too_many_bodies",
        "connections",
        "retry_budget_spent",
        "queue_full",
        "ingress_stopped",
        "no_instance",
    }
)
ENGINE_FAULTS = frozenset({"engine_failed"})
TELL_TALE = re.compile(
    rb"Traceback|File \"|site-packages|\.py\b|/home/|/root/|/work/|/tmp/|_INBOX|\$JS|nats://|POINTSMAN_|127\.0\.0\.1:\d|"
    rb"0x[0-9a-f]{8,}|asyncio|msgspec|aiohttp|pydantic|starlette"
)
"""Parts of addresses, paths and programs that no client has a use for."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_json(self) -> bool:
        return self.headers.get("content-type", "").startswith("application/json")


@dataclass
class Judge:
    """`secret`: texts that are in no answer: addresses, paths, keys."""

    secret: tuple[bytes, ...]
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    complaints: list[str] = field(default_factory=list)

    def hear(self, attempt: Attempt, raw: bytes) -> None:
        if not raw:
            self.unanswered += 1
            if attempt.complete and attempt.read_bytes_max is None:
                self._complain(attempt, "no answer to a whole request", b"")
            return
        self.check_leaks(attempt, raw)
        if attempt.read_bytes_max is not None:
            return
        for answer in parsed(raw, attempt.method == b"HEAD"):
            self.judge(attempt, answer)

    def judge(self, attempt: Attempt, answer: Answer) -> None:
        self.statuses[answer.status] += 1
        if 300 <= answer.status < 400:
            self._complain(attempt, f"{answer.status}: nothing here is elsewhere", str(answer.headers).encode())
        if answer.status < 400 or attempt.method == b"HEAD":
            return
        error = _error_of(answer)
        if error is None:
            self._complain(attempt, f"{answer.status} that is no error object", answer.body)
            return
        code = str(error.get("code") or error.get("type"))
        self.codes[f"{answer.status} {code}"] += 1
        if answer.status == 503 and not (
            code in UNAVAILABLE | {"overloaded_error"} and "retry-after" in answer.headers
        ):
            self._complain(attempt, f"503 {code}", answer.body)
        elif answer.status == 502 and code not in ENGINE_FAULTS | {"api_error"}:
            self._complain(attempt, f"502 {code}", answer.body)
        elif answer.status >= 500 and answer.status not in (502, 503):
            self._complain(attempt, f"{answer.status} {code}", answer.body)

    def check_leaks(self, attempt: Attempt, raw: bytes) -> None:
        found = [text for text in self.secret if text in raw]
        told = TELL_TALE.search(raw)
        if told is not None and told[0] not in attempt.raw:
            found.append(told[0])
        if found:
            self._complain(attempt, f"tells of {found}", raw)

    def _complain(self, attempt: Attempt, what: str, answer: bytes) -> None:
        if len(self.complaints) < 200:
            self.complaints.append(f"{what}\n  asked {attempt.raw[:1500]!r}\n  heard {answer[:1500]!r}")


def parsed(raw: bytes, bodiless: bool = False) -> list[Answer]:
    """The answers of one connection, those to pipelined requests too."""
    answers = []
    while raw:
        head, found, rest = raw.partition(b"\r\n\r\n")
        if not found:
            break
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if status == 100:
            raw = rest
            continue
        if bodiless:
            body, raw = b"", b""
        elif "content-length" in headers:
            length = int(headers["content-length"])
            body, raw = rest[:length], rest[length:]
        else:
            body, found, raw = rest.partition(b"\r\n0\r\n\r\n")
        answers.append(Answer(status, headers, body))
    return answers


def _error_of(answer: Answer) -> dict[str, Any] | None:
    """The error object, in OpenAI's form or Anthropic's."""
    try:
        told = json.loads(answer.body)
    except ValueError:
        return None
    error = told.get("error") if isinstance(told, dict) and answer.is_json else None
    if (
        not isinstance(error, dict)
        or not isinstance(error.get("message"), str)
        or not isinstance(error.get("type"), str)
    ):
        return None
    return error if told.get("type") == "error" or "code" in error else None
