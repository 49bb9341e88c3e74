"""quick"""

from __future__ import annotations
import argparse, json, os, sys, time
from dataclasses import replace, dataclass
from pathlib import Path
from pdconn.bench.serving.lineup import CONNECTORS, engine_specs
from pdconn.lab.client import Client, prefill_only
from pdconn.lab.compare import make_prompts
from pdconn.lab.engine import running
from pdconn.lab.model import SPECS, write_model


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kinds", nargs="+", default=["alone", "cold"])
    p.add_argument("--cores", default="apart")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--requests", type=int, default=4)
    p.add_argument("--dir", type=Path, default=Path(".work/first"))
    p.add_argument("--extra", default="{}")
    p.add_argument("--env", default="{}")
    o = p.parse_args()
    model = write_model(o.dir / "models", SPECS["handover"])
    env = json.loads(o.env)
    for rnd in range(o.rounds):
        specs = []
        names = []
        for kind in o.kinds:
            if kind == "alone":
                s = engine_specs(["alone"], model, o.cores)
                s = [replace(s[0], name="alone")]
            elif kind == "apart":
                s = engine_specs(["alone"], model, o.cores) + engine_specs(
                    ["alone"], model, o.cores
                )
                s = [replace(s[0], name="apart-p"), replace(s[1], name="apart-d", cpus=(1,))]
            else:
                conn = "in-tree" if kind == "in-tree" else "pdconn"
                s = engine_specs([conn], model, o.cores)
                P, D = s
                P = replace(P, name=f"{kind}-p", env={**P.env, **env, "FT_NAME": f"{kind}-p"})
                D = replace(D, name=f"{kind}-d", env={**D.env, **env, "FT_NAME": f"{kind}-d"})
                if "FT_DIR" in env and conn == "pdconn":
                    P, D = (
                        replace(
                            e,
                            kv_transfer_config={
                                **e.kv_transfer_config,
                                "kv_connector_module_path": "firsttrace",
                            },
                        )
                        for e in (P, D)
                    )
                if conn == "pdconn":
                    extra = json.loads(o.extra)
                    if kind.startswith("warmed"):
                        extra["warm_peers"] = [f"{P.host}:{P.side_channel_port}"]
                    D = replace(
                        D,
                        kv_transfer_config={
                            **D.kv_transfer_config,
                            "kv_connector_extra_config": {**extra},
                        },
                    )
                s = [P, D]
            names.append((kind, len(s)))
            specs += s
        t0 = time.monotonic()
        with running(specs, o.dir / "run", timeout_s=280) as engines:
            print(
                f"boot {time.monotonic() - t0:.1f}",
                [round(e.boot_s, 1) for e in engines],
                flush=True,
            )
            time.sleep(2.5)
            left = list(engines)
            groups = []
            for kind, n in names:
                groups.append((kind, left[:n]))
                del left[:n]
            for e in engines:
                e.pause()
            for kind, es in groups:
                for e in es:
                    e.resume()
                time.sleep(0.5)
                prompts = make_prompts([200] * o.requests, seed=77 + 100 * rnd)
                cs = [Client(e.url) for e in es]
                if kind.endswith("used"):
                    for c in cs:
                        for pr in make_prompts([200, 200], seed=5 + rnd):
                            c.stream(pr, 8)
                out = []
                for pr in prompts:
                    if kind == "alone":
                        t = cs[0].stream(pr, 8)
                        out.append((0, t.first_token_s, t.last_token_s))
                    elif kind == "apart":
                        b = time.perf_counter()
                        cs[0].complete(pr, 1)
                        q = time.perf_counter() - b
                        t = cs[1].stream(pr[-1:], 8)
                        out.append((q, t.first_token_s, t.last_token_s))
                    else:
                        print("  at", time.monotonic())
                        b = time.perf_counter()
                        tk = prefill_only(cs[0], pr)
                        q = time.perf_counter() - b
                        t = cs[1].stream(pr, 8, kv_transfer_params=tk)
                        out.append((q, t.first_token_s, t.last_token_s))
                print(
                    kind,
                    " | ".join(
                        f"P {1e3 * a:.0f} D {1e3 * b:.0f} = {1e3 * (a + b):.0f} (all {1e3 * (a + c):.0f})"
                        for a, b, c in out
                    ),
                    flush=True,
                )
                for e in es:
                    e.pause()


main()
