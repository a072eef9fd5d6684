"""Continuity of one engine's event stream, without I/O. In: frames, replay answers, interruptions. Out: items in order.

PUB/SUB can miss the beginning, drop messages silently, and restart at sequence 0 with the engine. One replay request,
"all from the last batch I read", settles each case. The same batch byte for byte: same engine, the rest was missed.
Another or none: a new engine. A later one: the rest left the engine's buffer. It is sent after a gap, after a reconnect
and during silence, since the last batch may have been dropped. Without a replay socket `certain` stays false, a lost
connection is a gap, and an old sequence is a duplicate, a late arrival or a new engine, by its payload.

After each call, read `next_item` until None, then `replay_request` until None; pass answers to `replayed`, `answer_ended`,
`answer_failed`."""

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
UNPROVEN_PAUSES_MAX = 2
"""After a reconnect, failures of the replay socket before live batches are attributed to a new engine."""
SEQUENCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class RawBatch:
    """`fingerprint` is empty for a late arrival, which does not move the cursor."""

    sequence: Sequence
    payload: bytes
    fingerprint: bytes = b""


Item = RawBatch | EngineAttached | EngineResumed | EngineRestarted | EngineGap | EngineReplayed | EngineNoise


class Continuity:
    """Times are seconds of any monotonic clock."""

    def __init__(self, *, replays: bool) -> None:
        self._replay = ReplayHealth(answers=True) if replays else None
        self._recent = RecentBatches()
        self._items: deque[Item] = deque()
        self._tasks: list[Verify | Begin | Resume | Deliver] = []
        self._expected: Sequence | None = None
        """The next sequence; None before the first is known."""
        self._fingerprint = b""
        self._last_live: Sequence = -1
        self._unproven = False
        """The connection was lost and not yet shown to reach the same engine."""
        self.cursor: Cursor | None = None

    @property
    def certain(self) -> bool:
        """Whether all missed batches were recovered, or will be once noticed."""
        return self._replay is not None and self._replay.answers and not self._unproven

    @property
    def catching_up(self) -> bool:
        """The engine's past is being read: batches tell of a cache as it was."""
        return any(isinstance(task, Verify | Begin) or (isinstance(task, Resume) and task.past) for task in self._tasks)

    def next_item(self) -> Item | None:
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, RawBatch) and item.fingerprint:
            self.cursor = Cursor(item.sequence, item.fingerprint)
        return item

    def start(self, after: Cursor | None = None) -> None:
        """Start reading, after the cursor's batch if the engine still has it (then with EngineResumed)."""
        if after is None:
            self._begin(EngineAttached)
        else:
            self._tasks.append(Verify(after))

    def interrupted(self) -> bool:
        """Possibly another engine from now on. Returns whether to discard queued messages: the replay contains them."""
        self._last_live = -1
        self._recent.found.clear()
        if self._replay is None:
            self._items.append(EngineGap(0, "the connection was lost, and there is no replay socket"))
            return False
        self._replay.paused_until = 0.0
        self._unproven = True
        return True

    def check(self, *, silent: bool, now: Seconds) -> None:
        """Also asks again, once, whether the replay answers."""
        unanswered = self._replay is not None and not self._replay.answers
        if (silent or self._unproven or unanswered) and self._can_replay(now):
            self._resume(failures=REPLAY_ATTEMPTS_MAX - 1 if unanswered else 0)

    def received(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            self._items.append(EngineNoise(f"a message of {len(frames)} frames without a sequence"))
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._unproven:
            if self._replay is not None and self._replay.unproven_pauses < UNPROVEN_PAUSES_MAX:
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

    def replay_request(self, now: Seconds) -> Sequence | None:
        """Returns the sequence from which to request a replay now, or None."""
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
                    self._pause(now)
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
        """Returns whether to read more of the answer."""
        assert self._replay is not None
        self._replay.has_answered = True
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
        assert self._replay is not None
        task = self._tasks[-1]
        match task:
            case Verify():
                self._tasks.pop()
                if task.matches:
                    self._expected, self._fingerprint = task.cursor.sequence + 1, task.cursor.fingerprint
                    self.cursor = task.cursor
                    self._items.append(EngineResumed())
                    self._resume(past=True)
                else:
                    self._begin(EngineAttached)
            case Begin():
                self._tasks.pop()
                if self._expected is None:
                    self._expected, self._replay.answers = 0, True
                    self._items.append(task.announcement(exact=True))
                else:
                    self._resume(past=True)  # the answer may have had a hole
            case Resume():
                self._end_answer(task)
            case Deliver():
                raise AssertionError

    def answer_failed(self) -> None:
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
            self._resume(past=True)

    def _begin(self, announcement: type[EngineAttached | EngineRestarted]) -> None:
        self._expected, self._fingerprint, self.cursor = None, b"", None
        self._unproven = False
        self._tasks.append(Begin(announcement))

    def _resume(self, *, ahead: bool = False, past: bool = False, failures: int = 0) -> None:
        self._tasks.append(Resume(ahead, past, failures))
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
            task.past = True
        return True

    def _end_answer(self, task: Resume) -> None:
        task.answered = True
        if task.recovered:
            self._items.append(EngineReplayed(task.recovered))

    def _conclude(self, task: Resume, now: Seconds) -> None:
        """A torn answer is requested again, at most REPLAY_ATTEMPTS_MAX times without progress."""
        assert self._replay is not None
        if task.torn:
            task.hole = task.new_hole
            task.failures = task.failures + 1 if self._expected == task.expected else 0
            if task.failures == REPLAY_ATTEMPTS_MAX:
                self._pause(now)
            return
        self._tasks.pop()
        behind = (
            task.empty and not task.ahead and bool(self._expected) and (self._replay.has_answered or self._unproven)
        )
        self._unproven, self._replay.unproven_pauses, self._replay.answers = False, 0, True
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
        """If the buffer does not reach back to a known batch, only an unbroken connection proves the same engine."""
        assert self._expected is not None
        if sequence == self._expected - 1:
            return fingerprint_of(payload) != self._fingerprint
        return self._unproven and self._expected > 0

    def _can_replay(self, now: Seconds) -> bool:
        return self._replay is not None and now >= self._replay.paused_until

    def _pause(self, now: Seconds) -> None:
        if self._replay is not None:
            self._replay.pause(now, unproven=self._unproven)
