"""The stores: KV of prompts that outlives the engine which computed it.

A prompt is cut into *canonical blocks* of ``block_tokens`` (256).  A *row* is one file: the KV
of one canonical block, all heads and layers of one kind of attention.  FA rows hold full
attention, one for every block of a prefix.  WA rows hold what windows and chunks still reach, and
recurrent states, and are kept only where generation can resume: a *boundary*, the end of a
canonical block::

    token      0        256       512       768      1024
    FA rows    [   0    ][   1    ][   2    ][   3    ]
    WA rows                                  [ 3 tail ]     boundary 1024 can be resumed

    format/    what a row is, and which rows a prompt has                        pure
    shelf/     where rows are kept: files, NIXL, a bucket
    budget/    how many bytes there may be, and what is evicted
    rank/      one worker's part: staging, reads, writes, copies
    engine/    one scheduler's part: requests and loads, look-ups, saves, commits
"""
