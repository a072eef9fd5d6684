"""The compiled part of Pointsman's library; see the README."""
