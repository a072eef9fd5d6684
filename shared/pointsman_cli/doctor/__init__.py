"""`pointsman doctor`: reads a log once and says what is wrong in it, with evidence and what to do.

`findings` is what comes out, `examination` reads and folds the log and shows every entry to each examiner, and the
other modules are the examiners, each with one subject. What an examiner keeps is bounded, however long the log is.
"""

from pointsman_cli.doctor.command import doctor_command

__all__ = ["doctor_command"]
