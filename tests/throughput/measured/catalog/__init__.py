"""Every benchmark whose tables stand in ``docs/benchmarks.md``, in the order in which they run.

    entry           what an entry says
    order           every benchmark, in the order in which they run
    shared          needs and words of several themes

    one_process     planning, checksums, encryption
    transfers       moving bytes
    interference    what lending and pulling cost the engine beside them
    handovers       what a user sees of a request that is handed over
    router          what the router costs and saves
    sessions        what sessions gain that are kept, and what others lose
    stores          what stores cost pulls, and rows in fewer bytes

To add one: write its entry below its theme, and list it in ``order``.
"""

from tests.throughput.measured.catalog.entry import (
    Benchmark,
    Command,
    Need,
    Table,
    library,
    package,
)
from tests.throughput.measured.catalog.order import BENCHMARKS

__all__ = ["BENCHMARKS", "Benchmark", "Command", "Need", "Table", "library", "package"]
