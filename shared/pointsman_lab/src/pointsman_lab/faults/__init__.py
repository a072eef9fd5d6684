"""`pointsman-lab faults`: a real fleet, real requests, and processes that are killed while it serves them.

`schedule` says what strikes when, from a seed; `fleet` starts what is struck; `strikes` does it and watches the fleet
come back; `network` is a TCP proxy before NATS that cuts, delays and drops. `clients` send and judge what they are told,
`witness` reads the log all the while, `engine_truth` asks the engines what they hold, and `checks` says in the end, from
all that, what does not hold. `command` is what people type, `report` what they see.

`pointsman-lab torture` judges the same of a whole system in virtual time; here nothing is simulated but the engines' work.
"""

from pointsman_lab.faults.command import faults_command

__all__ = ["faults_command"]
