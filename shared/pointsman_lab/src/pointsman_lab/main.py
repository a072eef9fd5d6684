"""The command `pointsman-lab`: the experiments of the authors."""

import click

from pointsman_cli.lazy_group import LazyGroup

COMMANDS = {
    "results": ("pointsman_lab.results.command", "results_command", "Run every study of docs/results.md."),
    "unseen": ("pointsman_lab.unseen", "unseen_command", "Compare policies on workloads that a seed draws."),
    "gateway": (
        "pointsman_lab.gateway.command",
        "gateway_command",
        "Measure what the ingress and the scheduler add to a direct call.",
    ),
    "agreement": (
        "pointsman_lab.agreement.command",
        "agreement_command",
        "Show that simulator and running fleet give the same numbers.",
    ),
    "faults": (
        "pointsman_lab.faults.command",
        "faults_command",
        "Kill the processes of a real fleet while it serves, and check that nothing is lost or doubled.",
    ),
    "hosts": (
        "pointsman_lab.hosts.command",
        "hosts_command",
        "Run a fleet on three hosts with a slow network that loses packets, and take hosts away.",
    ),
    "torture": (
        "pointsman_lab.torture.command",
        "torture_command",
        "Run the whole system on virtual time under seeded faults, and check what must hold.",
    ),
    "mutation": (
        "pointsman_lab.torture.mutation_command",
        "mutation_command",
        "Plant small defects and report which of them unit tests and torture find.",
    ),
    "tenants": (
        "pointsman_lab.tenants.command",
        "tenants_command",
        "Measure whether tenants' limits hold, and what a flooding tenant does to others.",
    ),
    "index": ("pointsman_lab.index", "index_command", "Measure the prefix index."),
    "following": (
        "pointsman_lab.following",
        "following_command",
        "Measure one worker that follows many engines, beside a worker for each.",
    ),
    "scale": (
        "pointsman_lab.scale.command",
        "scale_command",
        "Measure a pool of many simulated instances: decisions, log, memory, take-over, start.",
    ),
    "copies": (
        "pointsman_lab.copies",
        "copies_command",
        "Measure memory and start of the processes that hold a State.",
    ),
}
"""Name to module, attribute, and the line of `--help`."""


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
def main() -> None:
    """Measure Pointsman, compare it, and try to break it: the experiments behind docs/results.md and docs/testing.md."""
