"""Decisions of the leader. In: a command or a time, and the State. Out: decisions, applied already, to be published in
order. No clock, no I/O: scheduler, simulator and replay drive it."""

from pointsman.policies.dispatch.dispatcher import Dispatcher

__all__ = ["Dispatcher"]
