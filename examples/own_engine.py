"""An engine that is not vLLM lends hybrid KV, and another one pulls it: two processes.

    python examples/own_engine.py lend | python examples/own_engine.py pull

Both know the same prompt of 1024 tokens, and a model of two groups of layers: full attention,
and a sliding window of 128 tokens.  The lender keeps KV by layer in blocks of 16 tokens (BLHNC),
the puller by head in blocks of 32 (BHLNC).  The pipe carries the ticket, as a router does.
"""

import argparse
import json
import random
import secrets
import sys
import time
from collections.abc import Iterator

import torch

from pdconn.integrity.lent import lent_sums
from pdconn.integrity.memory import HostMemory
from pdconn.integrity.sums import Terms
from pdconn.lender.server import Lender
from pdconn.planning.plan import Need, window_start
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList, Ticket, parse_ticket, prompt_digest
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.puller.verification import Verify
from registration import AttentionKind, RegisteredKVMemory, allocation
from transport import Transport
from transport.choose import WANTED, choose
from transport.nixl.transport import NixlTransport
from transport.ucx.transport import UcxTransport

PROMPT, WINDOW = list(range(1024)), 128
HEADS, CONTENT, NUM_BLOCKS = 4, 64, 128
TRAITS = {"model": "example", "kv_cache_dtype": "uint8"}  # must be equal on both sides
HOST, TTL_S = "127.0.0.1", 30.0
Memory, Tables = allocation.KVCacheAllocation, tuple[BlockList, ...]


def kv_of(layer: str) -> torch.Tensor:
    """What the model computes for the prompt: (heads, tokens, content), no byte of it 0."""
    seed = torch.Generator().manual_seed(int(layer.removeprefix("layers.")))
    shape = (HEADS, len(PROMPT), CONTENT)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=seed)


def kv_memory(layout: str, block_tokens: int) -> Memory:
    """Zeroed memory for both groups; as in vLLM, one pool of block ids serves them (overlay)."""
    shape = (NUM_BLOCKS, HEADS, block_tokens, CONTENT)
    content = allocation.attention_in(layout, shape, torch.uint8)
    page = content.page_nbytes
    l0, l1, l2, l3 = (allocation.LayerPages(f"layers.{n}", content, page) for n in range(4))
    groups = [
        allocation.GroupPages(AttentionKind.FULL, None, block_tokens, (l0, l2)),
        allocation.GroupPages(AttentionKind.SLIDING_WINDOW, WINDOW, block_tokens, (l1, l3)),
    ]
    return allocation.allocate_in(layout, groups, NUM_BLOCKS, overlay=True)


def block_tables(memory: Memory) -> Tables:
    """Blocks of each group for the prompt: of the window only what the next token sees."""
    free, tables = random.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1), []  # block 0 means "none"
    for group in memory.references.groups:
        first = window_start(group, len(PROMPT)) // group.block_tokens
        end = len(PROMPT) // group.block_tokens
        tables.append(BlockList(first, tuple(free.pop() for _ in range(first, end))))
    return tuple(tables)


def blocks_and_kv(memory: Memory, tables: Tables) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each block of each layer as (heads, tokens, content), and the KV that belongs there."""
    for group, table in zip(memory.references.groups, tables, strict=True):
        for layer in group.layers:
            of_block = kv_of(layer).split(group.block_tokens, dim=1)
            for position, block in enumerate(table.ids, table.first):
                yield memory.views[layer][block], of_block[position]


def open_transport(wanted: str, name: str) -> Transport:
    """NIXL or UCX; with "auto" NIXL where it loads, else UCX."""
    openers = {"nixl": lambda: NixlTransport(name), "ucx": lambda: UcxTransport(name)}
    transport, choice = choose(wanted, openers)
    print(f"{name}: transport {choice}", file=sys.stderr)
    return transport


def lend(wanted: str, corrupts: bool) -> str | None:
    """Compute the prompt and lend its KV until it was read; returns what went wrong."""
    made, boot = kv_memory("BLHNC", block_tokens=16), secrets.token_hex(4)
    tables = block_tables(made)
    for block, kv in blocks_and_kv(made, tables):
        block.copy_(kv)
    transport = open_transport(wanted, "prefill")
    with RegisteredKVMemory(transport, made.references, made.owners) as memory:
        geometry = RankGeometry(0, 0, memory.address, memory.references)
        welcome = Welcome.in_our_version("prefill", boot, TRAITS, (geometry,))
        with Lender(welcome, HOST, port=0, is_summing=True) as lender:
            digest, tokens = prompt_digest(PROMPT), len(PROMPT)
            ticket = Ticket("prefill", boot, "r-1", HOST, lender.port, tokens, digest, tables)
            lender.lend(ticket.request_id, ticket.digest(), TTL_S)
            terms = Terms(ticket.request_id, tokens, sampled=False)
            sums = lent_sums(HostMemory(), made.references, tables, terms)
            lender.add_sums(ticket.request_id, 0, sums)
            if corrupts:  # as by a step that still writes to a block which is lent
                made.views["layers.1"][tables[1].ids[-1], 3, 15, 63] ^= 1
            print(json.dumps(ticket.to_params(tp_size=1, pp_size=1)), flush=True)
            while not (freed := lender.take_freed()):
                time.sleep(0.005)
    return None if freed[0].why == "read" else f"the lease was {freed[0].why}"


def pull(wanted: str, line: str) -> str | None:
    """Pull what a ticket names and compare every byte; returns what went wrong."""
    ticket = parse_ticket(json.loads(line))
    ticket.check_prompt(prompt_digest(PROMPT))
    made = kv_memory("BHLNC", block_tokens=32)
    tables = block_tables(made)
    memory = RegisteredKVMemory(open_transport(wanted, "decode"), made.references, made.owners)
    me = Rank("decode", rank=0, of=1, spread=0, references=made.references, traits=TRAITS)
    with memory, Puller(me, memory.transport, verify=Verify.ALWAYS) as puller:
        puller.post_command(ClaimTicket("r-7", "decode/1", ticket))  # when the request arrives
        need = Need.for_range(0, len(PROMPT), tables)
        puller.post_command(ReadBlocks("r-7", need))  # when it has blocks
        while not ((results := puller.take_results()).records or results.failed):
            puller.wait_for_report(timeout_s=1.0)
    if results.failed:
        return results.failed[0].reason
    pairs = list(blocks_and_kv(made, tables))
    needed = sum(kv.numel() for _, kv in pairs)
    wrong = sum(int((block != kv).sum()) for block, kv in pairs)
    written = sum(int(owner.count_nonzero()) for owner in made.owners)  # all was 0 before
    moved = results.records[0].moved
    print(f"pulled {moved.full} bytes of full attention, {moved.window} of the window")
    print(f"{moved.saved_by_window} before it were not needed; wrong bytes: {wrong}")
    return None if (moved.nbytes, written, wrong) == (needed, needed, 0) else "other bytes came"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=("lend", "pull"))
    parser.add_argument("--transport", choices=WANTED, default="auto")
    parser.add_argument("--corrupt", action="store_true", help="change a byte that was lent")
    given = parser.parse_args()
    if given.side == "lend":
        sys.exit(lend(given.transport, given.corrupt))
    sys.exit(pull(given.transport, input()))
