"""The transport over UCX alone, through UCXX; importing this package does not import ucxx.

transport   the transport's owner: registers memory, connects, posts and polls reads
thread      the one thread that touches UCX, for reader and lender
reader      requests pieces from lenders, which land in place
lender      answers readers: checks and sends pieces
frames      the control messages, authenticated with the lender's secret
pieces      cuts a read into pieces
runs        messages made of runs, by UCX's own functions
selftest    whether this UCX sends them as we expect
worker      one UCX worker, its endpoints and requests
library     imports ucxx; its settings and exceptions
"""
