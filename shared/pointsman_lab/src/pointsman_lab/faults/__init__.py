"""`pointsman-lab faults`: a real fleet under load while its processes are killed; checks that nothing is lost or doubled."""

from pointsman_lab.faults.command import faults_command

__all__ = ["faults_command"]
