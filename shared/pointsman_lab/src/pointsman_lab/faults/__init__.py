"""`pointsman-lab faults`: kills processes of a real fleet under load; checks that no request is lost or duplicated."""

from pointsman_lab.faults.command import faults_command

__all__ = ["faults_command"]
