"""`echo-jax`: reads the command line, runs one command, and says its exit status.

Knows the names of the commands and what every one of them has in common: absl's own flags, one line for wrong input, a
clean end on Ctrl-C, SIGTERM, a full disk and a closed pipe. A command's module is imported when it is named, so that
`echo-jax --help` is immediate.

Exit status: 0 what the user hoped for, 1 a difference found, 2 wrong input or a full disk, 3 no evidence where it was
required, 130 interrupted, 141 the reader of the output has gone, 143 terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from absl.flags import argparse_flags

from echo_jax.cli import options as options_lib
from echo_jax.cli import signals
from echo_jax.cli.errors import InputError, nearest, refusing_wrong_input

COMMANDS = {
    "generate": ("GenerateOptions", "continue prompts from an offloaded cache; show what moved; --check every bit"),
    "plan": ("PlanOptions", "the memory bill of a model and a cache, before anything is allocated"),
    "verify": ("VerifyOptions", "compare a model folder with answers computed by another implementation"),
    "replay": ("ReplayOptions", "the cache manager over a trace, under many policies; no model, no bytes, no GPU"),
    "trace": ("TraceOptions", "record a model's index scores, make synthetic ones, say how local they are"),
    "report": ("ReportOptions", "tables and figures of replays as Markdown and HTML; one decode step to step through"),
    "doctor": ("DoctorOptions", "what is available on this machine, and why not"),
}

DESCRIPTION = "Lossless KV-cache offload for models with native sparse attention (DeepSeek-V3.2, GLM-5)."
EPILOG = """\
try:
  echo-jax doctor
  echo-jax generate --model echo-tiny --prompt-file README.md --max-new-tokens 100 --check
  echo-jax COMMAND --help

absl's flags work too (--verbosity=1 adds the traceback to an error; --helpfull lists them)"""

OK, DIFFERENT, WRONG_INPUT, INTERRUPTED, BROKEN_PIPE, TERMINATED = 0, 1, 2, 130, 141, 143

# What a file system answers when a file cannot grow or cannot be written any more: the user's to mend.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def run() -> NoReturn:
    """The console entry."""
    signals.listen()
    app.run(_dispatch, flags_parser=_parse)
    raise AssertionError("absl's run ends the process")


def main(arguments: Sequence[str]) -> int:
    """The command line without the name of the program -> exit status. For callers in the same process."""
    try:
        return _dispatch(_parse(["echo-jax", *arguments]))
    except SystemExit as stop:  # argparse, after --help or for a wrong command line
        return stop.code if isinstance(stop.code, int) else WRONG_INPUT


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="echo-jax", description=DESCRIPTION, epilog=EPILOG, formatter_class=_Help, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, (options_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=_Help, allow_abbrev=False)
        parser.commands[name] = command
        if name in argv[1:]:
            module = importlib.import_module(f"echo_jax.cli.{name}")
            options = getattr(module, options_name)
            command.description, command.epilog = options.__doc__, module.EXAMPLES
            command.set_defaults(execute=module.execute, options=options)
            options_lib.add_arguments(command, options)
    namespace = parser.parse_args(list(argv[1:]))
    if flags.FLAGS["verbosity"].using_default_value:
        # absl would raise it to INFO, where jax tells everybody about the accelerators that this machine lacks.
        logging.set_verbosity(logging.WARNING)
    return namespace


class _Parser(argparse_flags.ArgumentParser):
    """Says what is wrong in one line, with the nearest option."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands: dict[str, argparse.ArgumentParser] = {}

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse ignores a reader that has gone; here it is answered as everywhere."""
        stream = file or sys.stderr
        try:
            stream.write(message)
            stream.flush()
        except BrokenPipeError:
            _silence_standard_output()
            raise SystemExit(BROKEN_PIPE) from None

    def error(self, message: str) -> NoReturn:
        words = self.prog.split()
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            named = next((one for one in sys.argv[1:] if one in self.commands), None) if self.commands else None
            parsers = [self, *([self.commands[named]] if named else self.commands.values())]
            known = {name for parser in parsers for name in _own_options(parser)}
            close = nearest(unknown[1], known)
            message += f"; {close.split('?')[0]}?" if "did you mean" in close else ""
        print(f"echo-jax: error: {message}; see `{' '.join(words)} --help`", file=sys.stderr)
        raise SystemExit(WRONG_INPUT)


def _own_options(parser: argparse.ArgumentParser) -> list[str]:
    """Options that `--help` shows; absl's are left out."""
    return [name for action in parser._actions if action.help != argparse.SUPPRESS for name in action.option_strings]


class _Help(argparse.RawDescriptionHelpFormatter):
    """Room for long options on one line, and no more than 110 columns."""

    def __init__(self, prog: str, **settings: Any):
        width = min(110, int(os.environ.get("COLUMNS", 0)) or _terminal_columns()) - 2
        super().__init__(prog, **({"max_help_position": 34, "width": width} | settings))


def _terminal_columns() -> int:
    with contextlib.suppress(OSError):
        return os.get_terminal_size().columns
    return 110


def _dispatch(namespace: argparse.Namespace) -> int:
    """Runs the chosen command; every way in which it may end becomes an exit status."""
    try:
        with refusing_wrong_input():
            options = options_lib.from_namespace(namespace.options, namespace)
        status = namespace.execute(options)
        sys.stdout.flush()  # here, where a full disk or a closed pipe has its answer
        return status
    except InputError as error:
        return _refuse(str(error))
    except signals.Terminated:
        signals.acknowledge()
        print("\necho-jax: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        signals.acknowledge()
        print("\necho-jax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _silence_standard_output()  # the reader has gone: `echo-jax ... | head`
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _silence_standard_output()
        where = f" {str(error.filename)!r}" if error.filename else ""
        return _refuse(f"output{where} cannot be written: {error.strerror}; free some space, or write elsewhere")
    except MemoryError as error:
        return _refuse(f"out of host memory ({error}); {_LESS_MEMORY}")
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refuse(f"out of memory ({str(error).splitlines()[0]}); {_LESS_MEMORY}")


def _silence_standard_output() -> None:
    """Python flushes it once more at the end of the process, and would complain again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_LESS_MEMORY = "lower the sizes of the cache, or the batch; `echo-jax plan` prints the bill in advance"


def _refuse(message: str) -> int:
    if logging.get_verbosity() >= logging.DEBUG:
        traceback.print_exc()
    print(f"echo-jax: error: {' '.join(message.split())}", file=sys.stderr)
    return WRONG_INPUT


if __name__ == "__main__":
    run()
