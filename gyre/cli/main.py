"""The `gyre` command. Bad input ends with exit code 2 and one sentence; an interrupted run with 130."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gyre.core.errors import ConfigError, GyreError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        print(f"gyre: {error}", file=sys.stderr)
        return 2
    except GyreError as error:
        print(f"gyre: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gyre", description="Online RL of LLM agents through unmodified harnesses.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run the main job of a config")
    train.add_argument("config", type=Path, nargs="?", help="TOML file; not needed with --resume")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="override single values")
    train.add_argument("--run-dir", type=Path, help="where everything lands; default runs/<config name>-<time>")
    train.add_argument("--resume", type=Path, metavar="RUN", help="continue this run from its last checkpoint")
    train.set_defaults(run=_train)

    inspect = commands.add_parser("inspect", help="steps, transitions, executions and trees of a run")
    inspect.add_argument("run_dir", type=Path)
    inspect.add_argument("--execution", metavar="ID", help="show one execution call by call")
    inspect.add_argument("--json", type=Path, metavar="OUT", help="write the summary as JSON")
    inspect.set_defaults(run=_inspect)

    export = commands.add_parser("export", help="write the last checkpoint as a Hugging Face model directory")
    export.add_argument("run_dir", type=Path)
    export.add_argument("--hf", type=Path, required=True, metavar="DIR")
    export.set_defaults(run=_export)

    doctor = commands.add_parser("doctor", help="check what this machine has and lacks")
    doctor.set_defaults(run=_doctor)

    setup = commands.add_parser("setup", help="install harnesses at their pinned versions")
    setup.add_argument("harnesses", nargs="+", metavar="HARNESS")
    setup.set_defaults(run=_setup)
    return parser


# Imports are inside the commands: `gyre doctor` must work where torch does not import.


def _train(arguments: argparse.Namespace) -> int:
    from gyre.cli.train import train

    return train(arguments.config, arguments.overrides, arguments.run_dir, arguments.resume)


def _inspect(arguments: argparse.Namespace) -> int:
    from gyre.cli.inspect import inspect

    return inspect(arguments.run_dir, execution=arguments.execution, json_out=arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    from gyre.cli.export import export

    return export(arguments.run_dir, arguments.hf)


def _doctor(_: argparse.Namespace) -> int:
    from gyre.cli.doctor import doctor

    return doctor()


def _setup(arguments: argparse.Namespace) -> int:
    from gyre.harnesses import install

    for name in arguments.harnesses:
        install(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
