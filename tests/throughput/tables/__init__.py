"""The README's measured tables: what is run for each, its result, and how it is written.

    registry   which benchmarks there are                      benchmark  what one is
    needs      what a machine must have for it                 runner     runs it
    record     what it measured: ``results/NAME.json``         node       reading that, strictly
    alone, handover, router, serving, transfer      records -> tables
    markdown   how tables look
    markers    where tables stand in a text                    book       the README and its results
    files      replaces a file whole                           errors     what can be wrong

To add a benchmark:

1. Give it ``--json FILE``: medians and what they were made with; samples only under names that
   ``drop`` can list.  Exit status 0 means that the result may be shown.
2. Write a function of its ``Record`` that returns Markdown, in one of the rooms above or a new one;
   ``record.result(RUN)["field"].number`` names what it does not find.  What was run, when and on
   what is written under it by itself.
3. Add an entry to ``registry``, and to the README two lines,
   ``<!-- measured:NAME -->`` and ``<!-- /measured:NAME -->``, where the table is to stand.
4. ``make bench ARGS="--run NAME"``; commit ``results/NAME.json`` and the README.
"""
