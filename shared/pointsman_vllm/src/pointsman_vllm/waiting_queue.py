"""The requests that wait for an engine, and which one is admitted next: vLLM's request queue with another order.

Next is, among the clients that have something of their quantum left, the request with the longest cached prefix, tempered
by how long it has waited. Before all of them come those that the engine had admitted and put back to make room: they
have paid.

vLLM looks at the first (`peek_request`), takes it out (`pop_request`) if it can be admitted but also if it must be passed
over for now, and goes on to the next; at the end of the step those passed over come back (`prepend_requests`). So a request
is charged when it is seen to run, not when it is taken out. When the first one does not fit, vLLM admits nobody behind
it, as with its own queues; when it fits, it is admitted whatever its client has used. Nothing idles for fairness.

It has the methods of vLLM's `RequestQueue` and nothing of vLLM in it.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import chain, count
from typing import Any, Generic, Protocol, TypeVar

from pointsman_vllm.deficits import Deficits

LOOKS_MAX = 128
"""Waiting requests whose cached prefix is looked up in one step of the engine: the oldest of each client in turn."""

CLIENT_ARGUMENT = "pointsman_client"
ANONYMOUS = ""


class Waiting(Protocol):
    """What is used of vLLM's `Request`."""

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
    """Whose request this is: `vllm_xargs: {"pointsman_client": ...}` of its body. All without one are one client."""
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    return str(arguments.get(CLIENT_ARGUMENT, ANONYMOUS))


class WaitingQueue(Generic[R]):
    """One line for each client, and those who come before everybody."""

    def __init__(
        self,
        deficits: Deficits,
        *,
        cached_tokens: Callable[[R], int],
        runs: Callable[[R], bool],
        ageing_tokens: float,
    ) -> None:
        """`cached_tokens`: how much of a prompt is in the cache now, asked once a step and request. `runs`: whether the
        engine has admitted a request that it took out."""
        self._deficits = deficits
        self._cached_tokens = cached_tokens
        self._runs = runs
        self._ageing_tokens = ageing_tokens
        self._arrivals = count()
        self._places: dict[str, int] = {}
        """By id: the order of arrival of those who wait."""
        self._lines: dict[str, list[R]] = {}
        """By client, oldest first; a client without a request has none."""
        self._returned: deque[R] = deque()
        self._taken: dict[str, tuple[R, int]] = {}
        """By id: those taken out in this step whose fate is not known yet, with their places."""
        self._admitted: set[str] = set()
        self._matches: dict[str, int] = {}
        self._next: R | None = None

    def begin_step(self) -> None:
        """The engine is about to admit: what was cached may be so no longer."""
        self._matches.clear()
        self._next = None

    def end_step(self) -> None:
        """The engine has admitted whom it could. Those whom it took out and keeps elsewhere are its own business."""
        self._taken.clear()
        self._admitted.clear()

    def admitted(self, request: R, cached_tokens: int) -> None:
        """The request runs, with so many tokens that need not be computed. A second call in one step does nothing."""
        if request.request_id in self._admitted:
            return
        self._admitted.add(request.request_id)
        if not request.num_preemptions:
            client = client_of(request)
            self._deficits.admit(client, request.num_tokens - cached_tokens, {*self._lines, client})

    def add_request(self, request: R) -> None:
        self._put(request, next(self._arrivals))

    def peek_request(self) -> R:
        """The one that is next. Raises IndexError where nobody waits."""
        if not self._places:
            msg = "nobody waits"
            raise IndexError(msg)
        if self._next is None:
            self._settle()
            self._next = self._returned[0] if self._returned else self._choose()
        return self._next

    def pop_request(self) -> R:
        """Take out the one that is next. Raises IndexError where nobody waits."""
        request = self.peek_request()
        self._taken[request.request_id] = (request, self._take_out(request))
        return request

    def prepend_request(self, request: R) -> None:
        """Somebody comes back: before everybody who had been admitted, to the old place who had not."""
        _, place = self._taken.pop(request.request_id, (request, None))
        self._put(request, next(self._arrivals) if place is None else place)

    def prepend_requests(self, requests: Iterable[R]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: R) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[R]) -> None:
        """Those who do not wait here are passed over."""
        for request in requests:
            if request.request_id in self._places:
                self._take_out(request)

    def __bool__(self) -> bool:
        return bool(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[R]:
        """Those who come before everybody, then by arrival."""
        return chain(tuple(self._returned), sorted(chain(*self._lines.values()), key=self._place))

    def _choose(self) -> R:
        clients = nsmallest(
            LOOKS_MAX, self._deficits.in_turn(self._lines), key=lambda c: self._place(self._lines[c][0])
        )
        looks = LOOKS_MAX // len(clients)
        return max((r for client in clients for r in self._lines[client][:looks]), key=self._merit)

    def _merit(self, request: R) -> tuple[float, int]:
        """The higher, the sooner; of equals the oldest."""
        name = request.request_id
        if name not in self._matches:
            self._matches[name] = self._cached_tokens(request)
        return self._matches[name] - self._ageing_tokens * request.arrival_time, -self._place(request)

    def _settle(self) -> None:
        """Account those who were taken out before and run by now, so that the next choice knows."""
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
            insort(self._lines.setdefault(client_of(request), []), request, key=self._place)

    def _take_out(self, request: R) -> int:
        """Returns the place that it had."""
        self._next = None
        if request.num_preemptions:
            self._returned.remove(request)
        else:
            client = client_of(request)
            self._lines[client].remove(request)
            if not self._lines[client]:
                del self._lines[client]
        return self._places.pop(request.request_id)

    def _place(self, request: R) -> int:
        return self._places[request.request_id]
