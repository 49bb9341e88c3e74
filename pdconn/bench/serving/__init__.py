"""A serving benchmark: real answers, streamed and timed, from several contestants in turn.

replies      what came of one request                                    pure
stream       an answer out of server-sent events                         pure
schedule     who is measured when, and when requests come                pure
summary      TTFT, ITL, handover, goodput; whose answers are wrong       pure
client       asks one OpenAI-compatible server, many at a time
contestants  who is measured: engines of our own, or a service that runs
lineup       the engines that a connector needs
turns        measures everyone, round by round
report       a table and a document
"""
