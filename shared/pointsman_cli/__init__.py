"""The command `pointsman`. Importing this package needs nothing but Python."""
