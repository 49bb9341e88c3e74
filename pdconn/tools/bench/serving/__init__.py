"""A serving benchmark: real answers, streamed and timed, from several contestants in turn.

replies        the result of one request, and of one turn                 pure
answer_stream  parses an answer from server-sent events                   pure
schedule       the order of turns, and when requests are sent             pure
summary        TTFT, ITL, handover, goodput; which answers are wrong      pure
service        sends requests to one OpenAI-compatible server
contestants    the measured systems: local engines, or a running service
lineup         the engines that each contestant needs
turns          measures all contestants, round by round
serve_report   a table and a JSON document
"""
