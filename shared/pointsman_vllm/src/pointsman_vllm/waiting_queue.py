"""vLLM's request queue with another order of admission, without imports of vLLM. Next is, among clients with a balance,
the request with the longest cached prefix, adjusted by its waiting time. Preempted requests come first: they have paid.

vLLM pops a request to admit or to skip it, and returns the skipped ones at the end of the step. So requests are charged
when they run, not when popped. If the first does not fit, nothing behind it is admitted, as in vLLM; if it fits, it is
admitted whatever its client has used, so the engine never idles for fairness."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import chain, count
from typing import Any, Generic, Protocol, TypeVar

from pointsman_vllm.deficits import Deficits

LOOKS_MAX = 128
"""Bounds cache lookups per step: the oldest request of each client in turn."""
CLIENT_ARGUMENT = "pointsman_client"
ANONYMOUS = ""


class Waiting(Protocol):
    @property
    def request_id(self) -> str: ...

    @property
    def arrival_time(self) -> float: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def sampling_params(self) -> Any: ...


R = TypeVar("R", bound=Waiting)


def client_of(request: Waiting) -> str:
    """`vllm_xargs: {"pointsman_client": ...}` of the body; all without it are one client."""
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    return str(arguments.get(CLIENT_ARGUMENT, ANONYMOUS))


class WaitingQueue(Generic[R]):
    def __init__(
        self,
        deficits: Deficits,
        *,
        cached_tokens: Callable[[R], int],
        runs: Callable[[R], bool],
        ageing_tokens: float,
    ) -> None:
        """`cached_tokens`: called once per step and request. `runs`: whether the engine admitted a popped request."""
        self._deficits = deficits
        self._cached_tokens = cached_tokens
        self._runs = runs
        self._ageing_tokens = ageing_tokens
        self._arrivals = count()
        self._places: dict[str, int] = {}
        self._queues: dict[str, list[R]] = {}
        self._returned: deque[R] = deque()
        self._taken: dict[str, tuple[R, int]] = {}
        """By id: popped in this step and not settled yet, with their places."""
        self._admitted: set[str] = set()
        self._matches: dict[str, int] = {}
        self._next: R | None = None

    def begin_step(self) -> None:
        """Called before admission; discards the cached prefix lengths."""
        self._matches.clear()
        self._next = None

    def end_step(self) -> None:
        """Called after admission; popped requests kept elsewhere are dropped here."""
        self._taken.clear()
        self._admitted.clear()

    def admitted(self, request: R, cached_tokens: int) -> None:
        """The request runs, with this many tokens cached. Idempotent within a step."""
        if request.request_id in self._admitted:
            return
        self._admitted.add(request.request_id)
        if not request.num_preemptions:
            client = client_of(request)
            self._deficits.admit(client, request.num_tokens - cached_tokens, {*self._queues, client})

    def add_request(self, request: R) -> None:
        self._put(request, next(self._arrivals))

    def peek_request(self) -> R:
        """Raises IndexError if empty."""
        if not self._places:
            raise IndexError("no request waits")
        if self._next is None:
            self._settle()
            self._next = self._returned[0] if self._returned else self._choose()
        return self._next

    def pop_request(self) -> R:
        """Raises IndexError if empty."""
        request = self.peek_request()
        self._taken[request.request_id] = (request, self._take_out(request))
        return request

    def prepend_request(self, request: R) -> None:
        """A preempted request goes first, a skipped one to its old place."""
        _, place = self._taken.pop(request.request_id, (request, None))
        self._put(request, next(self._arrivals) if place is None else place)

    def prepend_requests(self, requests: Iterable[R]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: R) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[R]) -> None:
        for request in requests:
            if request.request_id in self._places:
                self._take_out(request)

    def __bool__(self) -> bool:
        return bool(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[R]:
        return chain(tuple(self._returned), sorted(chain(*self._queues.values()), key=self._place))

    def _choose(self) -> R:
        clients = nsmallest(
            LOOKS_MAX, self._deficits.in_turn(self._queues), key=lambda c: self._place(self._queues[c][0])
        )
        looks = LOOKS_MAX // len(clients)
        return max((r for client in clients for r in self._queues[client][:looks]), key=self._merit)

    def _merit(self, request: R) -> tuple[float, int]:
        name = request.request_id
        if name not in self._matches:
            self._matches[name] = self._cached_tokens(request)
        return self._matches[name] - self._ageing_tokens * request.arrival_time, -self._place(request)

    def _settle(self) -> None:
        running = [request for request, _ in self._taken.values() if self._runs(request)]
        for request in running:
            del self._taken[request.request_id]
            self.admitted(request, request.num_computed_tokens)

    def _put(self, request: R, place: int) -> None:
        self._next = None
        self._places[request.request_id] = place
        if request.num_preemptions:
            self._returned.appendleft(request)
        else:
            insort(self._queues.setdefault(client_of(request), []), request, key=self._place)

    def _take_out(self, request: R) -> int:
        self._next = None
        if request.num_preemptions:
            self._returned.remove(request)
        else:
            client = client_of(request)
            self._queues[client].remove(request)
            if not self._queues[client]:
                del self._queues[client]
        return self._places.pop(request.request_id)

    def _place(self, request: R) -> int:
        return self._places[request.request_id]
