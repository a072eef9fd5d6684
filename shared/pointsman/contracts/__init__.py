"""What crosses the wire: events of the log, commands between services, their subjects and their encoding.

Wire structs only grow: a new field has a default, nothing is renamed or retyped. Each has golden bytes in
`tests/golden`; changing those bytes is a decision, not a fix.
"""
