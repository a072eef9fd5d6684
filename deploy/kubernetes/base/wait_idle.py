"""preStop of an engine: returns once it has had no request for a while. By then nothing new comes: a pod that terminates is
not ready in its EndpointSlice, and the worker says so to the scheduler. Kubernetes ends the wait with the grace period."""

import re
import sys
import time
from urllib.request import urlopen

SETTLE_SECONDS = 5.0
REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def requests_in(url: str) -> float:
    with urlopen(url, timeout=5) as answer:
        return sum(map(float, REQUESTS.findall(answer.read().decode())))


def main() -> None:
    busy_at = time.monotonic()
    while time.monotonic() - busy_at < SETTLE_SECONDS:
        try:
            busy = requests_in(sys.argv[1]) > 0
        except (OSError, ValueError) as error:
            sys.exit(f"{sys.argv[1]}: {error}")  # an engine that does not answer serves nobody
        if busy:
            busy_at = time.monotonic()
        time.sleep(0.5)


if __name__ == "__main__":
    main()
