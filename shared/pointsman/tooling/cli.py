"""The command `pointsman`: what people type. Each subcommand is imported only when it is asked for, so that
`pointsman --help` and `pointsman up` start at once.
"""

from importlib import import_module
from importlib.metadata import version

import click
from typing_extensions import override

COMMANDS = {
    "up": ("pointsman.tooling.up.command", "up_command", "Start a whole fleet here and run it until Ctrl-C."),
    "fleet": ("pointsman.tooling.fleet", "fleet_command", "Show the instances of a running fleet."),
    "scale": ("pointsman.tooling.scale", "scale_command", "Have another number of instances, or see how many and why."),
    "drain": ("pointsman.tooling.drain", "drain_command", "Take an instance out of service without losing a request."),
    "undrain": ("pointsman.tooling.drain", "undrain_command", "Let a drained instance take requests again."),
    "tap": ("pointsman.tooling.tap", "tap_command", "Print what goes into the log, live."),
    "replay": (
        "pointsman.tooling.history.replay_command",
        "replay_command",
        "Fold a recorded log again, and verify every decision of it.",
    ),
    "state": (
        "pointsman.tooling.history.state_command",
        "state_command",
        "Show the fleet as it was known at some moment.",
    ),
    "explain": ("pointsman.tooling.explain", "explain_command", "Tell the story of one request, and why it was slow."),
    "doctor": ("pointsman.tooling.doctor", "doctor_command", "Read a log and say what is wrong in it."),
    "what-if": (
        "pointsman.tooling.what_if",
        "what_if_command",
        "Run recorded traffic again under another policy or fleet size.",
    ),
    "export": ("pointsman.tooling.history.export_command", "export_command", "Write a log into one portable file."),
    "calibrate": (
        "pointsman.tooling.calibrate",
        "calibrate_command",
        "Measure what prefills cost on an engine, to predict them.",
    ),
    "bench": ("pointsman.tooling.bench", "bench_command", "Replay a workload against a fleet, or compare policies."),
    "simulate": (
        "pointsman.tooling.simulate",
        "simulate_command",
        "Compare policies on a trace or a generated workload, in virtual time.",
    ),
    "results": (
        "pointsman.tooling.results",
        "results_command",
        "Run every study of docs/results.md anew.",
    ),
    "bench-gateway": (
        "pointsman.tooling.bench_gateway",
        "bench_gateway_command",
        "Measure what the ingress and the scheduler add to a direct call.",
    ),
    "bench-agreement": (
        "pointsman.tooling.bench_agreement",
        "bench_agreement_command",
        "Show that simulator and running fleet give the same numbers.",
    ),
    "bench-faults": (
        "pointsman.tooling.bench_faults",
        "bench_faults_command",
        "Kill the processes of a real fleet while it serves, and check that nothing is lost or doubled.",
    ),
    "torture": (
        "pointsman_torture.command",
        "torture_command",
        "Run the whole system on virtual time under seeded faults, and check what must hold.",
    ),
    "bench-elasticity": (
        "pointsman.tooling.bench_elasticity",
        "bench_elasticity_command",
        "Show how a fleet grows under load and shrinks after it.",
    ),
    "bench-index": ("pointsman.tooling.bench_index", "bench_index_command", "Measure the prefix index."),
    "bench-plan": ("pointsman.tooling.bench_plan", "bench_plan_command", "Measure planning of migrations."),
}
"""Name to module, attribute, and the line that `pointsman --help` shows."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports them when they are run."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        found = getattr(import_module(module), attribute)
        if not isinstance(found, click.Command):
            message = f"{module}.{attribute} is no command"
            raise TypeError(message)
        return found

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, _, help_line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
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
