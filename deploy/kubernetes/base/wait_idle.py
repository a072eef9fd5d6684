"""preStop of an engine: returns once it has had no request for a while. By then nothing new comes: a pod that terminates is
not ready in its EndpointSlice, and the worker says so to the scheduler. Kubernetes ends the wait with the grace period."""

import re
import sys
import time
from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

SETTLE_SECONDS = 5.0
# An engine under load answers late. One that is silent for so long serves nobody.
SILENCE_SECONDS_MAX = 60.0
# Never by a proxy of the environment, which does not reach 127.0.0.1 of this pod.
DIRECT = build_opener(ProxyHandler({}))
REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def requests_in(url: str) -> float:
    """Raises OSError, HTTPException, ValueError."""
    with DIRECT.open(url, timeout=5) as answer:
        return sum(map(float, REQUESTS.findall(answer.read().decode())))


def main() -> None:
    url = sys.argv[1]
    busy_at = answered_at = time.monotonic()
    while time.monotonic() - busy_at < SETTLE_SECONDS:
        try:
            busy = requests_in(url) > 0
            answered_at = time.monotonic()
        except (OSError, HTTPException, ValueError) as error:
            if is_gone(error) or time.monotonic() - answered_at > SILENCE_SECONDS_MAX:
                sys.exit(f"{url}: {error}")
            busy = True
        if busy:
            busy_at = time.monotonic()
        time.sleep(0.5)


def is_gone(error: Exception) -> bool:
    """Whether nothing listens there: urllib hides the reason in an error of its own."""
    return isinstance(getattr(error, "reason", error), ConnectionRefusedError)


if __name__ == "__main__":
    main()
