"""The leader's turn: which decisions follow when a request arrives or ends, or when an instance changes.

In: a command or a moment, and the State. Out: decisions, applied to the State already, to be published in their order. No
clock and no I/O: the scheduler drives it in real time, the simulator in virtual time, replay from the log.
"""

from pointsman.policies.dispatch.dispatcher import Dispatcher

__all__ = ["Dispatcher"]
