"""The command `pointsman`: what users run."""

from importlib.metadata import version

import click

from pointsman_cli.lazy_group import LazyGroup

COMMANDS = {
    "up": ("pointsman_cli.up.command", "up_command", "Start a whole fleet here and run it until Ctrl-C."),
    "fleet": ("pointsman_cli.fleet", "fleet_command", "Show the instances of a running fleet."),
    "scale": ("pointsman_cli.scale", "scale_command", "Have another number of instances, or see how many and why."),
    "drain": ("pointsman_cli.drain", "drain_command", "Take an instance out of service without losing a request."),
    "undrain": ("pointsman_cli.drain", "undrain_command", "Let a drained instance take requests again."),
    "tap": ("pointsman_cli.tap", "tap_command", "Print what goes into the log, live."),
    "replay": (
        "pointsman_cli.history.replay_command",
        "replay_command",
        "Fold a recorded log again, and verify every decision of it.",
    ),
    "state": ("pointsman_cli.history.state_command", "state_command", "Show the fleet as it was known at some moment."),
    "explain": ("pointsman_cli.explain", "explain_command", "Tell the story of one request, and why it was slow."),
    "doctor": ("pointsman_cli.doctor", "doctor_command", "Read a log and say what is wrong in it."),
    "what-if": (
        "pointsman_cli.what_if",
        "what_if_command",
        "Run recorded traffic again under another policy or fleet size.",
    ),
    "export": ("pointsman_cli.history.export_command", "export_command", "Write a log into one portable file."),
    "calibrate": (
        "pointsman_cli.calibrate",
        "calibrate_command",
        "Measure what prefills cost on an engine, to predict them.",
    ),
    "bench": ("pointsman_cli.bench", "bench_command", "Replay a workload against a fleet, or compare policies."),
    "simulate": (
        "pointsman_cli.simulate",
        "simulate_command",
        "Compare policies on a trace or a generated workload, in virtual time.",
    ),
}
"""Name to module, attribute, and the line of `--help`."""


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(version("pointsman"), prog_name="pointsman")
def main() -> None:
    """Route LLM requests to the engine that already holds their prefix, and write down why.

    \b
    Begin with:
      pointsman up                      a fleet of simulated engines, in the foreground until Ctrl-C
    and in another terminal:
      pointsman fleet --watch           who is there, how loaded, how well known
      pointsman tap                     every event and decision, as it happens
      pointsman bench --workload chat   requests, and how well they were served

    A command finds the fleet that runs on this machine by itself; with several, or with one elsewhere, say
    --data DIR or --nats URL. Each command's own --help has examples, and the POINTSMAN_* variable of each setting.
    """
