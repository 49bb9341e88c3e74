"""What is lent beside a finished prompt: prefixes that are asked for, answers, shared tickets.

- :mod:`~pdconn.vllm.lends.prefixes`: a part of what this engine holds, on request.
- :mod:`~pdconn.vllm.lends.answers`: prompt and answer, for the next turn of a conversation.
- :mod:`~pdconn.vllm.lends.lendable`: what of these is there.
- :mod:`~pdconn.vllm.lends.shared_tickets`: one ticket for the answers of a best-of-n request.
"""
