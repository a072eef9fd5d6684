"""Continuity of one engine's event stream, without I/O. In: frames, replay answers, interruptions. Out: items in order, and
questions for the replay socket.

PUB/SUB promises nothing: a slow joiner misses the beginning, a full buffer drops silently, a restarted engine begins again
at sequence 0. One question to the replay socket settles all three: "everything from the last batch I saw". The same batch,
byte for byte: the same engine, and the rest was missed. Another batch or none: a new engine. A later one: the rest has left
the engine's buffer. It is asked after a hole, after a reconnect, and when the engine is silent, because the last batch
before a silence may be the one that was dropped.

Without a replay socket `certain` is false for good, a lost connection is a gap, and a sequence that was passed already is a
repetition, a late arrival or a new engine, as its payload tells.

Use: after each call read `next_item` until None, then `question` until None; feed an answer by `replayed`, `answer_ended` or
`answer_failed`.
"""

from collections import deque
from dataclasses import dataclass

from pointsman.adapters.kv_events.continuity_tasks import (
    Begin,
    Deliver,
    RecentBatches,
    ReplayHealth,
    Resume,
    Verify,
    fingerprint_of,
)
from pointsman.adapters.kv_events.events import (
    Cursor,
    EngineAttached,
    EngineGap,
    EngineNoise,
    EngineReplayed,
    EngineRestarted,
    EngineResumed,
)
from pointsman.primitives import Seconds, Sequence

REPLAY_ATTEMPTS_MAX = 3
UNPROVEN_RESTS_MAX = 2
"""After a reconnect, how often the replay socket may fail before live batches are taken for a new engine's."""
SEQUENCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A payload whose turn it is. `fingerprint` is empty for a late arrival, which moves no cursor."""

    sequence: Sequence
    payload: bytes
    fingerprint: bytes = b""


Item = RawBatch | EngineAttached | EngineResumed | EngineRestarted | EngineGap | EngineReplayed | EngineNoise


class Continuity:
    """One engine's stream. Times are of any monotonic clock, in seconds."""

    def __init__(self, *, replays: bool) -> None:
        """`replays`: whether there is a replay socket."""
        self._replay = ReplayHealth(answers=True) if replays else None
        self._recent = RecentBatches()
        self._items: deque[Item] = deque()
        self._tasks: list[Verify | Begin | Resume | Deliver] = []
        """What is being done, innermost last."""
        self._expected: Sequence | None = None
        """The sequence that comes next; None while not even the first is known."""
        self._fingerprint = b""
        self._last_live: Sequence = -1
        self._unproven = False
        """Whether the connection was lost and not yet shown to lead to the same engine."""
        self.cursor: Cursor | None = None
        """Of the last batch that `next_item` gave."""

    @property
    def certain(self) -> bool:
        """Whether everything missed so far was recovered, or will be as soon as it is noticed."""
        return self._replay is not None and self._replay.answers and not self._unproven

    def next_item(self) -> Item | None:
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, RawBatch) and item.fingerprint:
            self.cursor = Cursor(item.sequence, item.fingerprint)
        return item

    # Input

    def start(self, after: Cursor | None = None) -> None:
        """Begin reading, after the batch of a cursor if the engine still has it (then with EngineResumed)."""
        if after is None:
            self._begin(EngineAttached)
        else:
            self._tasks.append(Verify(after))

    def interrupted(self) -> bool:
        """The connection broke or came up: it may be another engine from now on. Returns whether to discard what is queued,
        because the replay has what is worth having."""
        self._last_live = -1
        self._recent.found.clear()
        if self._replay is None:
            self._items.append(EngineGap(0, "the connection was lost, and there is no replay socket"))
            return False
        self._replay.rests_until = 0.0
        self._unproven = True
        return True

    def check(self, *, silent: bool, now: Seconds) -> None:
        """Ask whether anything was missed, if the engine was `silent` or the connection is unproven."""
        if (silent or self._unproven) and self._can_replay(now):
            self._resume()

    def received(self, frames: list[bytes]) -> None:
        """A message of the subscription: topic, sequence, payload."""
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            self._items.append(EngineNoise(f"a message of {len(frames)} frames without a sequence"))
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._unproven:
            if self._replay is not None and self._replay.unproven_rests < UNPROVEN_RESTS_MAX:
                return  # only the replay can tell whose batch this is, and will give it once more
            self._unproven = False
            self._restart_at(sequence)
        if self._expected is None:
            self._expected = sequence
        if self._replay is None and sequence < self._expected:
            if self._recent.repeats(sequence, payload):
                return
            if self._recent.arrives_late(sequence):
                self._items.append(RawBatch(sequence, payload))
                self._recent.remember(sequence, fingerprint_of(payload))
                return
            self._recent.found.clear()
            self._restart_at(sequence)
        passed = self._replay is not None and sequence <= self._last_live
        self._last_live = sequence
        if sequence == self._expected and not passed:
            self._take(sequence, payload)
            return
        self._tasks.append(Deliver(sequence, payload))
        if passed:
            self._resume()

    # The replay socket

    def question(self, now: Seconds) -> Sequence | None:
        """The sequence from which to ask the replay socket now; None where there is nothing to ask."""
        while self._tasks:
            task = self._tasks[-1]
            match task:
                case Verify():
                    if self._replay is not None and task.attempts < REPLAY_ATTEMPTS_MAX:
                        task.attempts += 1
                        return task.cursor.sequence
                    self._tasks.pop()
                    self._begin(EngineAttached)
                case Begin():
                    if task.attempts < REPLAY_ATTEMPTS_MAX and self._can_replay(now):
                        task.attempts += 1
                        return 0
                    self._tasks.pop()
                    self._rest(now)
                    self._items.append(task.announcement(exact=False))
                case Resume(answered=True):
                    task.answered = False
                    self._conclude(task, now)
                case Resume():
                    if self._expected is not None and self._can_replay(now):
                        task.expected, task.new_hole = self._expected, None
                        task.empty, task.torn, task.new_engine, task.recovered = True, False, False, 0
                        return max(0, self._expected - 1)
                    self._tasks.pop()
                case Deliver():
                    self._deliver(task)
        return None

    def replayed(self, sequence: Sequence, payload: bytes) -> bool:
        """A batch of the answer. Returns whether more of the answer is wanted."""
        assert self._replay is not None
        self._replay.gave = True
        task = self._tasks[-1]
        match task:
            case Verify():
                task.matches = Cursor(sequence, fingerprint_of(payload)) == task.cursor
                return False
            case Begin():
                if self._expected is None:
                    self._expected = sequence
                    self._items.append(task.announcement(exact=sequence == 0))
                if sequence != self._expected:
                    return False
                self._take(sequence, payload)
                return True
            case Resume():
                return self._resumed(task, sequence, payload)
            case Deliver():
                raise AssertionError

    def answer_ended(self) -> None:
        """The answer is complete, or no more of it was wanted."""
        assert self._replay is not None
        task = self._tasks[-1]
        match task:
            case Verify():
                self._tasks.pop()
                if task.matches:
                    self._expected, self._fingerprint = task.cursor.sequence + 1, task.cursor.fingerprint
                    self.cursor = task.cursor
                    self._items.append(EngineResumed())
                    self._resume()
                else:
                    self._begin(EngineAttached)
            case Begin():
                self._tasks.pop()
                if self._expected is None:
                    self._expected, self._replay.answers = 0, True
                    self._items.append(task.announcement(exact=True))
                else:
                    self._resume()  # the answer may have had a hole
            case Resume():
                self._end_answer(task)
            case Deliver():
                raise AssertionError

    def answer_failed(self) -> None:
        """The replay socket did not answer, or broke off."""
        assert self._replay is not None
        task = self._tasks[-1]
        if isinstance(task, Verify):
            return
        self._replay.answers = False
        if isinstance(task, Resume):
            task.torn = True
            self._end_answer(task)
        elif self._expected is not None:
            self._tasks.pop()
            self._resume()

    # Transitions

    def _begin(self, announcement: type[EngineAttached | EngineRestarted]) -> None:
        self._expected, self._fingerprint, self.cursor = None, b"", None
        self._unproven = False
        self._tasks.append(Begin(announcement))

    def _resume(self, *, ahead: bool = False) -> None:
        self._tasks.append(Resume(ahead))
        if self._expected is None and self._unproven:  # nothing was ever seen of the engine before
            self._begin(EngineRestarted)

    def _resumed(self, task: Resume, sequence: Sequence, payload: bytes) -> bool:
        assert self._expected is not None
        if task.empty and self._is_new_engine(sequence, payload):
            task.new_engine = True
            return False
        if sequence > self._expected:
            if not task.empty and self._expected != task.hole:
                task.torn, task.new_hole = True, self._expected  # lost on its way? the next answer will tell
                return False
            self._items.append(EngineGap(sequence - self._expected, "left the engine's buffer"))
            self._expected = sequence
        task.empty = False
        if sequence == self._expected:
            self._take(sequence, payload)
            task.recovered += 1
        return True

    def _end_answer(self, task: Resume) -> None:
        task.answered = True
        if task.recovered:
            self._items.append(EngineReplayed(task.recovered))

    def _conclude(self, task: Resume, now: Seconds) -> None:
        """What an answer tells of the engine; a torn one is asked for again, at most REPLAY_ATTEMPTS_MAX times without
        progress."""
        assert self._replay is not None
        if task.torn:
            task.hole = task.new_hole
            task.failures = task.failures + 1 if self._expected == task.expected else 0
            if task.failures == REPLAY_ATTEMPTS_MAX:
                self._rest(now)
            return
        self._tasks.pop()
        behind = task.empty and not task.ahead and bool(self._expected) and (self._replay.gave or self._unproven)
        self._unproven, self._replay.unproven_rests, self._replay.answers = False, 0, True
        if task.new_engine or behind:  # behind: the engine has not come as far as we have seen
            self._begin(EngineRestarted)

    def _deliver(self, task: Deliver) -> None:
        if self._expected is None:
            self._expected = task.sequence
        if task.sequence > self._expected and not task.asked:
            task.asked = True
            self._resume(ahead=True)
            return
        self._tasks.pop()
        if task.sequence > self._expected:
            self._items.append(EngineGap(task.sequence - self._expected, "not replayed"))
            self._expected = task.sequence
        if task.sequence == self._expected:
            self._take(task.sequence, task.payload)

    def _take(self, sequence: Sequence, payload: bytes) -> None:
        self._expected = sequence + 1
        self._fingerprint = fingerprint_of(payload)
        if self._replay is None:
            self._recent.remember(sequence, self._fingerprint)
        self._items.append(RawBatch(sequence, payload, self._fingerprint))

    def _restart_at(self, sequence: Sequence) -> None:
        self._expected = sequence
        self._items.append(EngineRestarted(exact=sequence == 0))

    def _is_new_engine(self, sequence: Sequence, payload: bytes) -> bool:
        """Whether the first batch of an answer is another engine's. Where the buffer does not reach back to a batch that was
        seen, only a connection that was never lost means the same engine."""
        assert self._expected is not None
        if sequence == self._expected - 1:
            return fingerprint_of(payload) != self._fingerprint
        return self._unproven and self._expected > 0

    def _can_replay(self, now: Seconds) -> bool:
        return self._replay is not None and now >= self._replay.rests_until

    def _rest(self, now: Seconds) -> None:
        if self._replay is not None:
            self._replay.rest(now, unproven=self._unproven)
