"""What people run by hand: up, fleet, tap, bench, the simulated engine."""
