"""The command `pointsman`: what users run."""

from importlib.metadata import version

import click

from pointsman_cli.lazy_group import LazyGroup

COMMANDS = {
    "up": ("pointsman_cli.up.command", "up_command", "Start a whole fleet here and run it until Ctrl-C."),
    "fleet": ("pointsman_cli.fleet", "fleet_command", "Show the instances of a running fleet."),
    "scale": ("pointsman_cli.scale", "scale_command", "Ask for a number of instances, or see how many and why."),
    "drain": ("pointsman_cli.drain", "drain_command", "Take an instance out of service without losing a request."),
    "tap": ("pointsman_cli.tap.command", "tap_command", "Print the events of the log, live."),
    "replay": (
        "pointsman_cli.history.replay_command",
        "replay_command",
        "Fold a recorded log again, and verify every decision in it.",
    ),
    "state": ("pointsman_cli.history.state_command", "state_command", "Show the fleet as it was known at some moment."),
    "explain": (
        "pointsman_cli.explain.command",
        "explain_command",
        "Show what happened to one request, and why it was slow.",
    ),
    "doctor": ("pointsman_cli.doctor.command", "doctor_command", "Read a log and list what is wrong in it."),
    "what-if": (
        "pointsman_cli.what_if.command",
        "what_if_command",
        "Run recorded traffic again under another policy or fleet size.",
    ),
    "export": ("pointsman_cli.history.export_command", "export_command", "Write a log into one portable file."),
    "calibrate": (
        "pointsman_cli.calibrate.command",
        "calibrate_command",
        "Measure prefill times of an engine, to predict them.",
    ),
    "bench": (
        "pointsman_cli.bench.command",
        "bench_command",
        "Replay a workload against a fleet, or compare policies.",
    ),
    "simulate": (
        "pointsman_cli.simulate.command",
        "simulate_command",
        "Compare policies on a trace or a generated workload, in virtual time.",
    ),
}
"""Name to module, attribute, and line of `--help`."""


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(version("pointsman"), prog_name="pointsman")
def main() -> None:
    """Route LLM requests to the engine that already holds their prefix, and write down why.

    \b
    Start with:
      pointsman up                      a fleet of simulated engines, in the foreground until Ctrl-C
    and in another terminal:
      pointsman fleet --watch           the instances, their load, and how well their caches are known
      pointsman tap                     every event and decision, as it happens
      pointsman bench --workload chat   sends requests, and reports how well they were served

    Commands find the only fleet of this machine; otherwise name it with --from DATA_DIRECTORY or --from nats://HOST.
    Each command's --help has examples.
    """
