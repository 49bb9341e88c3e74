"""The parts of ``docs/`` that are made from the code: ``python -m tests.project.docs.generate``.

A generated part stands between two comments, and everything between them is replaced::

    <!-- generated:NAME -->
    ...
    <!-- /generated -->

Each part asks the code itself: argparse for the command line, the Prometheus collectors for
metrics, ``pdconn.vllm.config.KEYS`` for settings, docstrings for the list of modules.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import html
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from examples import mooncake_trace
from tests.project.docs import store_settings as store_settings_table
from tests.project.docs.claims import measured_parts

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

_PART = re.compile(
    r"(?P<open><!-- generated:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /generated -->\n)", re.DOTALL
)

#: Packages in the order of a pull, and then the rest; everything below one is listed with it.
PACKAGES = (
    "pdconn/vllm", "pdconn/lender", "pdconn/puller",
    "pdconn/sidechannel", "pdconn/lifecycle",
    "pdconn/planning", "pdconn/protocol", "pdconn/integrity", "registration", "transport",
    "pdconn/store", "pdconn/router", "pdconn/faults", "pdconn/tools/plan", "pdconn/tools/cli",
    "pdconn/tools/doctor", "pdconn/tools/bench", "pdconn/tools/lab", "pdconn/tools/openai",
    "pdconn/tools/output",
)  # fmt: skip


class NoSuchPart(LookupError):
    """A page names a part that nothing makes."""


def settings() -> str:
    """Every key of ``kv_connector_extra_config``."""
    from pdconn.vllm.config import KEYS

    rows = (
        (f"`{key.name}`", key.takes, key.default, key.side, key.help, key.in_tree or "none")
        for key in KEYS
    )
    return _table(("key", "takes", "default", "read by", "meaning", "in NixlConnector"), rows)


def in_tree_keys() -> str:
    """Every key of NixlConnector that is none of ours, and what becomes of it."""
    from pdconn.vllm.nixl.in_tree_keys import IN_TREE_KEYS

    rows = (
        (f"`{key.name}`", key.takes, f"`{key.ours}`" if key.ours else "not needed", key.meaning)
        for key in IN_TREE_KEYS
    )
    return _table(("key of NixlConnector", "takes", "with pdconn", "meaning"), rows)


def store_settings() -> str:
    """Every key of ``store`` in ``kv_connector_extra_config``."""
    return _table(("key", "takes", "default", "meaning"), store_settings_table.rows())


def command_line() -> str:
    """Every command with its options, and the examples that ``--help`` ends with."""
    from pdconn.tools.cli.main import COMMANDS, build_parser

    parts = []
    for command in COMMANDS:
        found = _subparsers(build_parser(configured=command.name))[command.name]
        nested = _subparsers(found)
        parts += [_command(one) for one in (nested.values() or [found])]
    return "\n".join(parts)


def _subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _command(parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog)
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        value = "" if action.nargs == 0 else formatter._format_args(
            action, formatter._get_default_metavar_for_optional(action)
            if action.option_strings
            else formatter._get_default_metavar_for_positional(action),
        )  # fmt: skip
        row = (names, f"`{value}`" if value else "") if names else (f"`{value}`", "argument")
        rows.append((*row, _help(formatter, action)))
    lines = [f"## {parser.prog}", "", parser.description or "", ""]
    lines += [_table(("option", "value", "meaning"), rows)]
    if parser.epilog:
        lines += ["```text", parser.epilog.rstrip(), "```", ""]
    return "\n".join(lines)


def _help(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    return formatter._expand_help(action) if action.help else ""


def example(*words: str) -> str:
    """A command of ours and what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pdconn.tools.cli.main", *words],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return f"```text\n$ pdconn {' '.join(words)}\n{done.stdout.rstrip()}\n```\n"


def example_plan_store() -> str:
    """What ``pdconn plan --store`` adds to a plan, without the plan."""
    words = "plan", "--model", "gemma-3-27b", "--prompt", "32k", "--decode", "tp=2", "--store"
    text = example(*words, "--prefill-rate", "12000")
    return re.sub(r"(?<=12000\n).*?\n(?=store  )", "...\n", text, flags=re.DOTALL)


def example_plan_trace() -> str:
    """What ``pdconn plan --store --trace`` adds, of a trace of 500 requests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        lines = (json.dumps(one) + "\n" for one in mooncake_trace.requests(500))
        path.write_text("".join(lines), encoding="utf-8")
        words = "plan", "--model", "gpt-oss-120b", "--store", "--trace", str(path)
        more = "--engine-cache", "64k", "--prefill-rate", "12000"
        text = example(*words, *more).replace(str(path), path.name)
    return re.sub(r"(?<=12000\n).*?\n(?=trace  )", "...\n", text, flags=re.DOTALL)


def example_plan_tutorial() -> str:
    """A plan over Ethernet without its table of groups, which is wide."""
    words = "plan", "--model", "gemma-3-27b", "--prompt", "8192", "--link", "tcp-25"
    return re.sub(r"(?<=\n)\n +block .*?(?=predicted: )", "...\n", example(*words), flags=re.DOTALL)


def versions() -> str:
    """The versions of everything that two engines, or an engine and a store, must agree on."""
    from pdconn.protocol.auth import VERSION
    from pdconn.protocol.messages import PROTOCOL_VERSION
    from pdconn.protocol.ticket import TICKET_VERSION
    from pdconn.store.format.footer import FORMAT_VERSION
    from pdconn.store.shelf.folders import ROOT_VERSION
    from transport.ucx.control import PROTOCOL

    rows = (
        ("handshake with a secret", VERSION, "`VERSION` in `pdconn/protocol/auth.py`"),
        (
            "side channel's messages",
            PROTOCOL_VERSION,
            "`PROTOCOL_VERSION` in `pdconn/protocol/messages.py`",
        ),
        ("ticket", TICKET_VERSION, "`TICKET_VERSION` in `pdconn/protocol/ticket.py`"),
        ("reads with `transport: ucx`", PROTOCOL, "`PROTOCOL` in `transport/ucx/control.py`"),
        ("rows of a store", FORMAT_VERSION, "`FORMAT_VERSION` in `pdconn/store/format/row.py`"),
        ("root of a store", ROOT_VERSION, "`ROOT_VERSION` in `pdconn/store/shelf/folders.py`"),
    )
    named = ((what, f"`{number}`", where) for what, number, where in rows)
    return _table(("what", "version", "where it stands"), named)


def engine_metrics() -> str:
    """What an engine adds to vLLM's ``/metrics``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's and others', about each other
        from pdconn.vllm.stats import PdPromMetrics
    registry = CollectorRegistry()
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    PdPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    return _metrics(registry.collect())


def router_metrics() -> str:
    """What ``pdconn proxy`` serves at ``/metrics``, asked of a running one."""
    engine = "http://127.0.0.1:9,events=tcp://127.0.0.1:9"
    words = ["proxy", "--prefill", engine, "--decode", engine, "--port", "0", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pdconn.tools.cli.main", *words, "--log-level", "error"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["admin_url"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
            text = page.read().decode()
    finally:
        process.terminate()
        process.communicate(timeout=30)
    return _metrics(text_string_to_metric_families(text))


def router_outcomes() -> str:
    """Every outcome of a client's request, and whose failure it is."""
    from pdconn.router.labels import RequestEnd

    rows = ((f"`{one.value}`", one.fault.value, one.meaning) for one in RequestEnd)
    return _table(("`outcome`", "fault", "meaning"), rows)


def router_label_values() -> str:
    """Every value of every other label that comes from the code."""
    from pdconn.router.labels import RequestEnd
    from pdconn.router.metric_table import METRICS

    rows = [
        (f"`{row.name}`", f'`{label}="{one.value}"`', one.meaning)
        for row in METRICS
        for label, values in row.values.items()
        if values is not RequestEnd
        for one in values
    ]
    return _table(("metric", "value", "meaning"), rows)


def _metrics(families: Iterable[Metric]) -> str:
    """A row per family, by name; the labels that tell series apart, and not ``le``."""
    rows = []
    for family in sorted(families, key=lambda family: family.name):
        if family.name.endswith("_created"):
            continue
        labels = sorted({name for one in family.samples for name in one.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        named = ", ".join(f"`{label}`" for label in labels)
        rows.append((f"`{name}`", family.type, named, family.documentation))
    return _table(("metric", "type", "labels", "meaning"), rows)


def modules() -> str:
    """A line for each module: the first sentence of its docstring."""
    parts = []
    for package in PACKAGES:
        found = sorted((ROOT / package).rglob("*.py"))
        rows = [
            (f"`{path.relative_to(ROOT)}`", opening)
            for path in found
            if (opening := _opening(path))
        ]
        parts += [f"### {package}", "", _table(("module", "what it is"), rows)]
    return "\n".join(parts)


def state_machines() -> str:
    """The diagrams at the head of the machines, with the sentences that explain them."""
    parts = []
    for name in ("lease", "pull", "peer", "load"):
        path = ROOT / "pdconn/lifecycle" / f"{name}.py"
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        summary, diagram, meaning = re.split(r"\n\n::\n\n((?:    .*\n|\n)+)", docstring, maxsplit=1)
        parts += [f"### {name.capitalize()}", "", _plain(summary), "", "```text", ""]
        parts[-1:] = [line.removeprefix("    ") for line in diagram.rstrip().splitlines()]
        parts += ["```", "", _plain(meaning), ""]
    return "\n".join(parts)


def _opening(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split()).removesuffix("::").rstrip(":")
    return re.split(r"(?<=[.]) +(?=[A-Z])", _plain(first))[0]


def _plain(text: str) -> str:
    """Markdown of a docstring's words."""
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(headings)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(_cell(word) for word in line)} |\n" for line in lines)


def _cell(word: str) -> str:
    """A table's cell.  GitHub and MkDocs disagree about bars in code spans, so HTML has those."""
    plain = " ".join(word.split())
    if "|" not in plain:
        return plain
    coded = re.sub(r"`([^`]*)`", lambda found: f"<code>{html.escape(found[1])}</code>", plain)
    return coded.replace("|", "&#124;")


PARTS: Mapping[str, Callable[[], str]] = {
    **measured_parts.parts(_table),
    "settings": settings,
    "in-tree-keys": in_tree_keys,
    "store-settings": store_settings,
    "command-line": command_line,
    "example-plan": partial(
        example, "plan", "--model", "gpt-oss-20b", "--prompt", "32768",
        "--prefill", "tp=4,layout=LBHNC", "--decode", "tp=8",
    ),
    "example-plan-store": example_plan_store,
    "example-plan-trace": example_plan_trace,
    "example-plan-tutorial": example_plan_tutorial,
    "example-score": partial(example, "score", "examples/snapshot.json"),
    "engine-metrics": engine_metrics,
    "router-metrics": router_metrics,
    "router-outcomes": router_outcomes,
    "router-label-values": router_label_values,
    "state-machines": state_machines,
    "modules": modules,
    "versions": versions,
}  # fmt: skip


def generated(page: str, parts: Mapping[str, Callable[[], str]] = PARTS) -> str:
    """``page`` with every generated part made anew.

    Raises:
        NoSuchPart: the page names a part that ``parts`` lacks.
    """

    def anew(found: re.Match[str]) -> str:
        if found["name"] not in parts:
            raise NoSuchPart(f"generated:{found['name']}: expected one of {', '.join(parts)}")
        return f"{found['open']}\n{parts[found['name']]()}\n{found['close']}"

    return _PART.sub(anew, page)


def stale(pages: Iterable[Path], parts: Mapping[str, Callable[[], str]] = PARTS) -> Iterator[str]:
    """The difference between each page and what it should be, where there is one."""
    for path in pages:
        text = path.read_text(encoding="utf-8")
        made = generated(text, parts)
        if made != text:
            yield "\n".join(
                difflib.unified_diff(
                    text.splitlines(), made.splitlines(), str(path), "generated", "", "", 0, ""
                )
            )


def pages() -> list[Path]:
    """Every page with a generated part: the README, and pages of ``docs/``."""
    every = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    return [path for path in every if "<!-- generated:" in path.read_text(encoding="utf-8")]


def main(argv: list[str] | None = None) -> int:
    """Write the generated parts, or with ``--check`` say which are stale."""
    prog = "python -m tests.project.docs.generate"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; 1 if a part is stale")
    what.add_argument("--write", action="store_true", help="write what is stale (the default)")
    if parser.parse_args(argv).check:
        differences = list(stale(pages()))
        print("\n".join(differences), end="\n" if differences else "")
        if differences:
            print("docs/ is stale: run `make docs ARGS=--write`", file=sys.stderr)
        return 1 if differences else 0
    for path in pages():
        path.write_text(generated(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
