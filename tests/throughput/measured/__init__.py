"""Measured tables: which benchmarks there are, how they run, and what they measured.

    catalog   every benchmark: question, configuration, commands, columns of its tables
    run       runs one, and makes the record of it
    record    what it measured: ``results/NAME.json``, read strictly

``tests.throughput.render`` makes the tables of ``docs/benchmarks.md`` from the records.

    python -m tests.throughput.measured --list
    python -m tests.throughput.measured --run waterfall planning
    python -m tests.throughput.measured --check

To add a benchmark:

1. Give it ``--json FILE``: medians and what they were made with; samples only under names that
   ``drop`` can list.  Exit status 0 means that the result may be shown.
2. Add an entry to ``catalog``, with templates for its columns (see ``tests.throughput.render``),
   and two lines to ``docs/benchmarks.md``, ``<!-- measured:NAME -->`` and
   ``<!-- /measured:NAME -->``, where the table is to stand.
3. ``make bench ARGS="--run NAME"``; commit ``results/NAME.json`` and ``docs/benchmarks.md``.
"""
