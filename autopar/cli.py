"""The command line: `autopar plan | emit | run | verify`.

A model is named as `module:function`, a function without arguments that builds it, or as a Hugging Face config:
a file, a folder with config.json, or a name whose config is in the local cache.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from .errors import PlanError
from .ir.identifiers import printable
from .plan.options import JOB, OPTIONS, PINS, Option, check, nearest

_EXAMPLES = """\
examples:
  autopar plan meta-llama/Llama-3.1-8B --gpus 64 --sequence 8192 --global-batch 512 --explain
  autopar emit examples.gpt:build --inputs my_data:example --gpus 4 --gpu cpu --out gpt-4
  autopar run gpt-4 -- --steps 100 --log train.jsonl
  autopar verify examples.llama:tiny_llama --gpus 4 --gpu cpu --tp 2
  autopar verify gpt-4
"""
COMMANDS = ("plan", "emit", "run", "verify")
_INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A PlanError is one message and code 2 (AUTOPAR_DEBUG=1: its traceback)."""
    try:
        args = _parser().parse_args(argv)
        check({name: value for name, value in vars(args).items() if name in OPTIONS})
        # Only now, for it loads torch: what is wrong with the options is said at once.
        code: int = getattr(import_module("autopar.commands"), args.command)(args)
    except PlanError as error:
        if os.environ.get("AUTOPAR_DEBUG"):
            raise
        print(f"autopar: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


# --------------------------------------------------------------------------------
# Arguments


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest option."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrec") else []
        if chosen := re.search(r"invalid choice: '([^']*)' \(choose from", message):
            raise PlanError(f"no command {chosen[1]!r}{nearest(chosen[1], COMMANDS)}; there are {', '.join(COMMANDS)}")
        known = [option for option in self.known_options if option.startswith("--")]
        near = next((near for word in words if (near := nearest(word.partition("=")[0], known))), "")
        raise PlanError(f"{message}{near} ({self.prog} --help lists what there is)")

    @property
    def known_options(self) -> list[str]:
        """The flags of this parser and of its commands, as `--zero`."""
        known = [option for action in self._actions for option in action.option_strings]
        for action in self._actions:
            if isinstance(action.choices, Mapping):
                known += [option for command in action.choices.values() for option in command.known_options]
        return known


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = _Parser("autopar", description=__doc__, epilog=_EXAMPLES, formatter_class=kind)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, formatter_class=kind)

    plan = command("plan", "find the fastest plan and print what it costs")
    _add_options(plan)
    plan.add_argument("--explain", action="store_true", help="time and memory of each stage, what runners-up lose")
    plan.add_argument("--json", action="store_true", help="print for machines: plan, estimate, runners-up, reasons")
    plan.add_argument("--save", type=Path, metavar="FILE", help="write the plan as YAML, for emit --plan")
    emit = command("emit", "write the program of the fastest plan, or of a given one")
    _add_options(emit)
    emit.add_argument("--out", type=Path, metavar="DIR", required=True, help="the folder to write")
    emit.add_argument("--plan", type=Path, metavar="FILE", help="this plan, perhaps edited, instead of a search")
    emit.add_argument("--force", action="store_true", help="overwrite files of DIR that were edited by hand")
    run = command("run", "train a saved program on this machine, by torchrun")
    run.add_argument("folder", type=Path, metavar="DIR", help="what emit wrote")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ...", help="arguments of train.py")
    verify = command("verify", "train program and model side by side in fp64 on the CPU; DIR: what was edited")
    _add_options(verify)
    _add(verify, "steps", OPTIONS["steps"], default=5)
    verify.add_argument(
        "--original", metavar="MODEL", help="of a folder: the model, where the folder does not know it by name"
    )
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `parallelize`: those of OPTIONS, and names of functions."""
    parser.add_argument("model", metavar="MODEL", help="module:function, or a Hugging Face config (file, folder, name)")
    job = parser.add_argument_group("what to train, and on what")
    job.add_argument("--inputs", metavar="MODULE:FUNCTION", help="example inputs (default: inputs() beside the model)")
    job.add_argument("--loss", metavar="MODULE:FUNCTION", help="(outputs, batch) → scalar, where forward has no loss")
    job.add_argument("--gpu", metavar="NAME", help="h100-sxm-80gb, …, or cpu (default: this machine's)")
    for name, option in JOB.items():
        if name != "gpus_per_node":
            _add(job, name, option)
    pins = parser.add_argument_group("choices to fix")
    for name, option in PINS.items():
        _add(pins, name, option)
    pins.add_argument(
        "--forbid", action="append", default=[], metavar="NAME=VALUE", help="ban a choice: zero=3; may be repeated"
    )


def _add(group: argparse._ActionsContainer, name: str, option: Option, default: object = None) -> None:
    """One option: a flag where it has no value to name."""
    flag, text = f"--{name.replace('_', '-')}", option.text
    if option.metavar:
        group.add_argument(flag, type=option.read, metavar=option.metavar, help=text, default=default)
    else:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)


if __name__ == "__main__":
    sys.exit(main())
