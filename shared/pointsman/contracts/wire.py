"""Wire version: what the commands and events of this release can mean. It grows when a message gets a meaning that an
earlier release would lose by reading past an unknown field (docs/upgrades.md).

0: releases without a version (0.1). 1: unknown commands are refused by CommandRefused."""

WIRE_VERSION = 1
