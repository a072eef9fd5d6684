"""`pointsman what-if`: `recorded_traffic` turns a log into a workload, `calibration` makes the simulated engines as fast as the
recorded ones, `runs` simulates, `comparison` shows the results side by side."""
