"""The event log, the commands, the lease and the checkpoints in memory, for tests and the simulated cluster."""
