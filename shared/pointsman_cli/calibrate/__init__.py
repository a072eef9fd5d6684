"""`pointsman calibrate`: measure what prefills cost on one engine, and fit the cost model that placements are made by.

`measuring` sends prompts and takes times, `fitting` is the arithmetic, `command` is what people type.
"""

from pointsman_cli.calibrate.command import calibrate_command

__all__ = ["calibrate_command"]
