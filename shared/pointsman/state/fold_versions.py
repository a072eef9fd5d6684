"""Which version of the fold brought which rule. A log is folded and replayed by the version that its LeaderElected names:
decisions of before stay as they were made. 1 is a log that names none. A new rule that changes how an old event folds, or
an old decision is made, gets the next version, an entry here and a golden fold (`tests/golden`). So does a new event that
State folds: checkpoints of the release before, which skips it, lack what it says."""

FOLD_VERSION = 19
"""Of this release."""

DELIVERIES_CHECKED = 2
"""What engines report as cached is compared with what placements relied on; an engine must serve the pool's model."""
HOLDING = 3
"""Lost and held time extends a request's SLO; a split pool holds until both roles are there; Retry-After follows the scaler."""
TENANTS_SHARE_QUEUE = 4
"""A request of a tenant that has less than its share takes the place of another in a full queue."""
RELIES_AS_OF = 5
"""A placement does not rely on blocks stored after its `as_of`."""
UPPER_TTFT = 6
"""Placements predict within what nine of ten first tokens come."""
OUTPUT_LENGTHS = 6
"""Tokens of a tenant's requests in flight are reserved by their predicted output."""
SECONDS_BY_LENGTH = 6
"""Seconds per token are learned by prompt length (`LatencyModel`)."""
SLOW_DECODERS = 6
"""Where each decode instance is too slow for a request even alone, its TPOT objective refuses none."""
LATE_JOINS = 6
"""A copy of a join that comes after the instance left does not bring it back."""
PREFILL_RATE = 7
"""What waits and what is computed have corrections of their own (`LatencyModel`)."""
FAILED_TRIALS = 7
"""An instance whose trial failed gets no other request before that is judged."""
HOLD_NONE = 7
"""Without `hold_seconds` nothing is held, also where clocks differ."""
QUEUE_CLASS = 8
"""Waiting work is repriced in the class that it waits in; sums of best-effort work too."""
IDLE_QUEUES = 8
"""The queue of an instance that left ends with its last request."""
FETCH_ENDS = 8
"""Only a leader's grant begins a fetch, and a hand-over ends it."""
DECODE_LOAD = 8
"""Ends count for the decode load also in a pool that is not split."""
EMPTY_PROMPTS = 9
"""Outcomes of a tenant without prompt tokens count as those of others, instead of failing."""
KV_ORDER = 9
"""Where a request waits for its tenant's share of the KV capacity, later ones of the tenant wait behind it."""
REFUSED_ONCE = 9
"""A refused request is one outcome, and one request of its tenant; of best effort it is none."""
CLASS_CREDIT = 9
"""A class that waits saves up one second of credit at most."""
NO_PREDICTION = 9
"""Where an ingress chose the instance, nothing was predicted and nothing is learned about predictions."""
LEFT_FORGOTTEN = 9
"""With the last request of an instance that left, everything that was learned of it goes."""
FETCHES_OUTSIDE = 9
"""A request that still fetches does not keep the engine at work."""
BEST_EFFORT_STAYS = 10
"""A further attempt of a best-effort request is best effort, however long the request has waited."""
DECODE_ANSWERS = 10
"""A request that decodes counts once for each of its answers, also in what is learned of its instance's speed."""
RENAMED_ONCE = 10
"""A request that comes again under another id is booked once, and stays best effort."""
PREDICTIONS_KEPT = 10
"""Within a queue, neither fairness nor a cached prefix makes a request late that was placed to be on time (`fair_edf`)."""
IN_ORDER = 11
"""A decision that reaches the log behind a later one about the same (a drain or role, an ejection, tenant policies) is over."""
ATTEMPTS_COUNTED = 11
"""Failed and served attempts are told apart by the order of grants and of an instance's phases, not by dates; one that is
read after its retry counts as one that is read before."""
CLOCKS_DIFFER = 11
"""Dates of an ingress become the leader's (`ClockOffsets`). What ends by time ends by the leader's time. A worker's clock may
go back. A report ends a suspicion that was decided before it was read."""
SHORT_TURNS = 11
"""Of what may be thousands at once, a turn of the leader decides a part: requests that it ends (what their ends make room
for is granted behind them), and requests that leave an instance."""
FETCHES_THAT_PAY = 11
"""No prefix is fetched from an engine that failed the request, by one that leaves an engine, or copied to where no event
tells of it. A pair that failed rests by the leader's time, and how fast a slower tier loads is forgotten after some minutes."""
FAILURE_SHARE_BACK = 11
"""The failure share is that of the newest requests, of a minute where an interval has too few."""
PREFILLERS_BLAMED = 11
"""A request that fails where a KV cache should have come may be the fault of the engine that prefilled it. One that finishes
was served by both."""
ATTEMPTS_KEPT = 12
"""A failure is that of its own attempt, also where two more have been placed before it is read. One of a request that has
ended is dated by the leader's clock."""
SETTLED_AT_INTERVALS = 12
"""What engines delivered, lack in slower tiers or took to load ends within a quarter of a second of its time. To look for it
at each decision takes longer than a decision in a large pool."""
EPOCHS_BOUNDED = 12
"""Of instances that left long ago the newest epoch is forgotten."""
OTHERS_REFUSED = 13
"""A tenant beyond its share is limited while many requests of the others are refused. Its own, which the limit refuses, do
not count: they would keep the limit on (`TenantShares.many_refused`)."""
LOST_DOUBTED = 14
"""An engine that reports no work while it has a request is to blame once another one answers that, under another id: a request
that fails wherever it goes counts against none."""
TENANTS_BOUNDED = 15
"""Shares of at most 10,000 tenants are kept (`TenantShares`): a client without a key may name itself anew in each request."""
UNHEARD_SERVE = 15
"""Where no other instance takes requests, those with a silent worker do, and are not removed for ten times as long: the host
of a worker says nothing about the engines of other hosts."""
RESTS_FORGOTTEN = 15
"""A rest that is over is forgotten, and nothing is learned of a source that has left: names may never come back."""
UPPER_TRACKED = 16
"""The upper value of a prediction follows first tokens by what would be told now (`TtftIntervals`): by what was told, it swung
between nothing and 20 times the prediction where hundreds of requests wait."""
PROMISED_LATE = 17
"""What is on time alone only by a prefix that others compute is best effort where it would be refused, as they are."""
ANSWERS_COUNTED = 17
"""An instance that reports no work is idle anew after each answer, whatever date that has: a clock ahead of others hid later
answers."""
IDLE_LATE = 18
"""So is what is on time alone only by prefixes that busy instances hold, while half of the others are idle."""
DETACHED_BOUNDED = 19
"""An instance with very many blocks below others that are missing is cleared and doubted: its next event may connect them all."""
CACHED_STARTS = 19
"""A best-effort request whose prefix is cached by now needs no turn."""
