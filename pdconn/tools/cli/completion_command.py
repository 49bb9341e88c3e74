"""``pdconn completion``: shell completion of commands, options and their values.

The script is generated from the parsers, so it cannot be out of date, and completing starts no
Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_EPILOG = """\
Prints a script. bash and zsh read it at every start; fish finds it in its folder:

examples:
  source <(pdconn completion bash)                        in ~/.bashrc
  source <(pdconn completion zsh)                         in ~/.zshrc, behind compinit
  pdconn completion fish > ~/.config/fish/completions/pdconn.fish

exit codes:
  0    always
  2    bad command line
"""

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class CompletedOption:
    """An option: its names, its possible values, and whether it takes one."""

    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    takes_value: bool


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A command by its words, with its subcommands and options."""

    words: tuple[str, ...]
    below: dict[str, str] = field(default_factory=dict)
    options: tuple[CompletedOption, ...] = ()
    choices: tuple[str, ...] = ()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the name of the shell."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=SHELLS, help="the shell that will read it")


def run_command(args: argparse.Namespace) -> int:
    """Print the script."""
    found = list(all_commands())
    print(fish_script(found) if args.shell == "fish" else bash_script(found, args.shell))
    return 0


def all_commands() -> Iterator[CompletedCommand]:
    """Every command of ``pdconn``, outermost first."""
    from pdconn.tools.cli.main import COMMANDS, build_parser

    top = build_parser()
    yield from _commands(top, ("pdconn",), deep=False)
    for command in COMMANDS:
        sub = _below(build_parser(command.name))[command.name]
        yield from _commands(sub, ("pdconn", command.name), deep=True)


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...], *, deep: bool
) -> Iterator[CompletedCommand]:
    below: dict[str, str] = {}
    options: list[CompletedOption] = []
    choices: tuple[str, ...] = ()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = {one.dest: one.help or "" for one in action._choices_actions}
            continue
        values = tuple(map(str, action.choices or ()))
        if not action.option_strings:
            choices += values
        elif action.help != argparse.SUPPRESS:
            text = (action.help or "").partition(" (")[0].partition("; ")[0]
            takes = action.nargs not in {0, "?"}
            options.append(CompletedOption(tuple(action.option_strings), text, values, takes))
    yield CompletedCommand(words, below, tuple(options), choices)
    for name, sub in _below(parser).items() if deep else ():
        yield from _commands(sub, (*words, name), deep=True)


def bash_script(commands: list[CompletedCommand], shell: str = "bash") -> str:
    """A function for ``complete``; zsh runs it with bashcompinit."""
    paths = "|".join(f'"{" ".join(one.words)}"' for one in commands if len(one.words) > 1)
    values, words = [], []
    for one in commands:
        path = " ".join(one.words)
        for option in one.options:
            names = "|".join(f'"{path} {name}"' for name in option.names)
            if option.choices:
                values.append(f'    {names}) words="{" ".join(option.choices)}"; plain= ;;')
            elif option.takes_value:
                values.append(f"    {names}) return ;;")
        named = (*one.below, *one.choices, *(n for o in one.options for n in o.names))
        plain = "" if one.below or one.choices else "yes"
        words.append(f'    "{path}") words="{" ".join(named)}"; plain={plain} ;;')
    first = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""\
{first}_pdconn() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local path=pdconn words= plain= i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$path ${{COMP_WORDS[i]}}" in
      {paths}) path="$path ${{COMP_WORDS[i]}}" ;;
    esac
  done
  case "$path" in
{chr(10).join(words)}
  esac
  case "$path $previous" in
{chr(10).join(values)}
  esac
  # A word that is no option may be a file: bash completes those itself where nothing is given.
  if [[ -n "$plain" && "$cur" != -* ]]; then return; fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _pdconn pdconn"""


def fish_script(commands: list[CompletedCommand]) -> str:
    """One line per command and option."""
    lines = []
    for one in commands:
        inner = one.words[1:]
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in inner)
        here = shlex.quote(seen or "__fish_use_subcommand")
        not_yet = "".join(f"; and not __fish_seen_subcommand_from {name}" for name in one.below)
        at = here if not inner else shlex.quote(seen + not_yet)
        for name, text in one.below.items():
            lines.append(f"complete -c pdconn -f -n {at} -a {name} -d {shlex.quote(text)}")
        if one.choices:
            lines.append(f"complete -c pdconn -f -n {here} -a {shlex.quote(' '.join(one.choices))}")
        for option in one.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            value = f" -x -a {shlex.quote(' '.join(option.choices))}" if option.choices else ""
            value = value or (" -r" if option.takes_value else "")
            lines.append(
                f"complete -c pdconn -n {here} {names}{value} -d {shlex.quote(option.help)}"
            )
    return "\n".join(lines)
