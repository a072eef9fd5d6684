"""`pointsman simulate`: policies side by side on the same requests, in virtual time.

`command` reads what was asked for, `variants` are the policies to compare, `experiment` is one run and how many of
them share the cores, `report` turns runs into JSON and tables, `plots` into pictures.
"""

from pointsman_cli.simulate.command import simulate_command

__all__ = ["simulate_command"]
