"""What made requests late, in words, and what to do about it."""

from pointsman_cli.explain.causes import Cause
from pointsman_cli.options import as_given

_SENTENCES = {
    Cause.LONG_PROMPT: ("their own prompt takes longer than their objective", "Give them a longer objective (x-slo-ttft-ms), or shorten or split the prompts. More engines do not bring them in time; faster ones do (tensor parallelism, a smaller model)."),
    Cause.LONG_PROMPT_AHEAD: ("a long prompt was ahead of them", "A prompt that an engine computes is not overtaken: give long prompts a pool of their own, or the pool one engine more (`pointsman what-if{given} --instances N` says how many would do)."),
    Cause.HOT_PREFIX: ("they queued for the engine that holds a hot prefix", "`pointsman what-if{given} --policy pointsman` (or dualmap) shows whether spreading the prefix helps."),
    Cause.OVERLOAD: ("every engine had a queue (overload)", "`pointsman what-if{given} --instances N` says how many engines would do."),
    Cause.BUSY_INSTANCE: ("they queued at one engine while another was nearly idle", "`pointsman what-if{given} --policy pointsman` (or dualmap) shows what a policy that balances would make of it."),
    Cause.SLOW_ENGINE: ("their engine was slow", "Compare its machine with the others' (clock rate, neighbours); drain it if need be."),
    Cause.LOG_SLOW: ("their leader learned late what engines had finished", "Engines did their part. See the finding on the log: the disk of nats-server, or the CPU of the leader."),
    Cause.WHOLE_ANSWER: ("they were not streamed, and the whole answer had to be written first", "Until it is there no client has a token: stream them, or give them a longer objective (x-slo-ttft-ms)."),
    Cause.STALE_INDEX: ("tokens expected in a cache were not there and had to be computed", "See the findings on caches: emptied behind its back, evicted while requests wait, or events lost."),
    Cause.FAILED_ATTEMPTS: ("an engine failed them first", "See the findings on engines."),
    Cause.TRANSPORT: ("time went by between the processes: ingress, scheduler or network were busy or hung", "Engines did their part. Look at the CPU of ingresses and schedulers, at the network, and at the findings on leader changes and requests that were given up."),
    Cause.NO_SCHEDULER: ("no scheduler answered for a while", "Look at when the leader changed, and at the CPU of the schedulers; a second one (--schedulers 2) takes over within seconds."),
    Cause.SLOW_DECODE: ("their tokens would have come more slowly than they ask for", "Give them a longer objective (x-slo-tpot-ms), or the pool more engines."),
    Cause.NO_INSTANCE: ("no instance could take them", "See the findings on the fleet."),
}  # fmt: skip


def because(cause: Cause) -> str:
    return _SENTENCES[cause][0]


def advice_for(cause: Cause) -> str:
    return _SENTENCES[cause][1].format(given=as_given())
