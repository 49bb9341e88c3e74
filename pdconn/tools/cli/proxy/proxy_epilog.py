"""The text of ``pdconn proxy --help`` below the options."""

from __future__ import annotations

import textwrap

from pdconn.router.proxy_config import RELOADED

_SIGHUP = textwrap.indent(
    textwrap.fill(
        f"reads {', '.join(RELOADED[:-1])} and {RELOADED[-1]} again and resolves DNS names; a file "
        "with a mistake changes nothing",
        64,
        break_on_hyphens=False,
    ),
    19 * " ",
).strip()

EPILOG = """\
An OpenAI-compatible router for disaggregated serving. It sends each request to a
prefill engine for one token, then with the ticket of that answer
(kv_transfer_params) to a decode engine, and passes decode's answer to the client
byte for byte. If an engine cannot be reached, the router retries on another one and
probes the failed one's /health after 1, 2, 4, 8, 15, 15, ... seconds, or every 2
while no other engine of its role is up.

policies:
  prefix       the lowest cost in tokens: uncached prompt tokens + tokens queued
               (prefill) or requests in the batch (decode) + pressure on KV blocks.
               Prompts that begin alike go to the same engine if costs are equal. A
               decode engine that holds a prefix and lacks little of the rest serves
               the request alone (--alone-below)
  round-robin  engines take turns
  random       any engine

prefix cache: engines publish KV events if they run with
  --enable-prefix-caching --enable-prompt-tokens-details --kv-events-config
  '{"enable_kv_cache_events": true, "publisher": "zmq",
    "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
(with "*": vLLM connects to any other endpoint and listens nowhere).
Add the endpoints to the URL:
  URL,events=tcp://{host}:5557,replay=tcp://{host}:5657[,ranks=N]
{host} stands for the URL's host; with N data-parallel ranks, rank r uses port + r.
The router detects how engines hash blocks. A hit ends where every KV cache group
(full attention, sliding windows, states) has the blocks that it needs. Engines
without events are chosen by load alone.

fleets that change:
  --fleet FILE       TOML, polled; tables [[engine]] with url, roles = ["prefill",
                     "decode"], and optionally events, replay, ranks, draining = true
                     (finishes its requests and gets no new ones)
  dns+http://NAME:PORT[,events=...]  instead of a URL: every address of the DNS name

Decode serves these requests alone and computes the prompt itself; /metrics counts
them by reason: several prompts in one body, n > 1, beam search, echo,
prompt_logprobs, prompt_embeds, truncate_prompt_tokens, a stored or background
response, tools that the engine calls itself, a prefix that decode holds, and every
request while no prefill engine answers, or lends nothing (--require-prefill: 503).

routes for clients:
  POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages
  GET  /v1/models
  POST /tokenize, /v1/embeddings, /score, /rerank, /pooling, /v1/audio/..., ...
                               one engine serves these; docs/router.md lists all
  GET  /health                 503 if no request can be served, 200 if some can: "ok",
                               or "degraded" without prefill
  GET  /readyz, /ready         the same, and 503 once SIGTERM has come
  GET  /livez                  200 while the process runs

admin pages, on --admin-host and --admin-port, without key or TLS:
  GET  /                       live page: engines, pods, hits, decisions with reasons
  GET  /debug/state            the same as JSON
  GET  /debug/route/ID         the decision for the request with this X-Request-Id;
                               ?snapshot=1: as a file for pdconn score
  GET  /metrics                for Prometheus; also /health, /readyz, /livez

signals:
  SIGTERM, SIGINT  /readyz answers 503 for --drain-delay; then the proxy stops
                   listening, requests have --drain-timeout to finish, and tickets of
                   those cut off are given back. A second one ends it at once
  SIGHUP           {sighup}

examples:
  pdconn proxy --prefill http://localhost:8100 --decode http://localhost:8200
  pdconn proxy --prefill http://p0:8000,events=tcp://{host}:5557,replay=tcp://{host}:5657 \\
      --decode http://d0:8000,events=tcp://{host}:5557 --host 0.0.0.0 --wait 300
  pdconn proxy --fleet fleet.toml --policy prefix
  pdconn proxy --fleet fleet.toml --host 0.0.0.0 --api-key-file keys.txt \\
      --tls-cert proxy.pem --tls-key proxy.key --drain-delay 5
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "m", "prompt": "Once upon a time", "max_tokens": 16}'

exit codes:
  0    stopped by SIGTERM or SIGINT, after draining
  1    --wait is over and a role has no engine that answers
  2    bad options, or the address is not available
  130  a second SIGINT: stopped without draining
""".replace("{sighup}", _SIGHUP)
