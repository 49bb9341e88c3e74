"""The transport over UCX alone, through UCXX; importing this package does not import ucxx.

transport     the transport's owner: registers memory, connects, posts and polls reads
ucx_thread    the one thread that touches UCX, for reader and lender
reader_side   requests pieces from lenders, which land in place
lender_side   answers readers: checks and sends pieces
control       the control messages, authenticated with the lender's secret
pieces        cuts a read into pieces
run_messages  messages made of runs, by UCX's own functions
selftest      tests that this UCX sends them as expected
ucx_worker    one UCX worker, its endpoints and requests
library       imports ucxx; its settings and exceptions
"""
