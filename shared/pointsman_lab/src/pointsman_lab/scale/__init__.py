"""How a fleet of many instances runs on one machine: decisions, log, memory, take-over and start (`command`)."""
