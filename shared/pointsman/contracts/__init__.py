"""Wire messages: log events, commands, their subjects and encoding.

Wire structs only grow: a new field has a default, nothing is renamed or retyped. `tests/golden` has the bytes of each.
"""
