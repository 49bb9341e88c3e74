"""What this engine pulls.

pulling    the scheduler's part: which ticket is promised, read, given up or failed
tracked    what is known of a request with a ticket, and what is wrong with the ticket
patience   how long a request waits for a prefix
pulled     what a pull leaves in vLLM's cache: blocks written in part, blocks still written to
"""
