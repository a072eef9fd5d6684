"""Where a request goes: pools, commands to the scheduler, requests in flight."""
