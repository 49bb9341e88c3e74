"""Commands for users of engines and the router, which import nothing from here.

::

    cli      the command line: one module a command
    doctor   checks of engines, routers and configurations, with remedies
    plan     the size of a model's KV, and the cost of a pull or of a stored prefix
    bench    measured transfers and served requests
    lab      engines and a router on this machine, for demonstrations and benchmarks
    openai   requests to OpenAI-compatible servers, and their answers
    output   the result of a command, described once, as text or as JSON
"""
