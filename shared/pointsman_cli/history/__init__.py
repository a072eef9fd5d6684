"""Reading a log after the fact: `pointsman replay`, `state` and `export`, and the sources they read from.

`sources` is the way to any log, live or kept; `live`, `archive` and `bundle` are the three places it may be in. What is
done with the entries is `simulation.replay`'s; here is what people see of it.
"""
