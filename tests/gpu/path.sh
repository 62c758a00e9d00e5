# The whole path on one NVIDIA GPU: bash tests/gpu/path.sh learn|serve|breakeven|exact ...   (after `. /tmp/gpu/env.sh`)
#   learn      generate, extract, train                                                  about 6 min
#   serve      probe with SGLang in bfloat16 at concurrency 1, 4, 16                     about 6 min
#   breakeven  the same with a random drafter                                            about 3 min
#   exact      float16: SGLang's text against plain decoding, and beside it the reference engine on 100 of the prompts   about 5 min
# Settings: path.yaml, and whatever $EXTRA adds. Logs, probe.json, breakeven.json and SGLang's logs go to $OUT.
export HF_HUB_OFFLINE=1 TQDM_DISABLE=1 RAY_AUTH_MODE=disabled OUT=${OUT:-/tmp/run/out}
C=${CONFIG:-tests/gpu/path.yaml} RUN=${RUN:-/tmp/run/path} PY=${PY:-python3}
mkdir -p "$OUT" "$RUN"

stage() { # name, log, seconds, flags...
  local name=$1 log=$2 limit=$3 began=$SECONDS; shift 3
  # a Ctrl-C first: it ends the server in order
  timeout -s INT -k 30 "$limit" $PY -m ray_eagle "$name" -c "$C" --run "$RUN" $EXTRA "$@" >"$OUT/$log.log" 2>&1
  echo "$log: rc $?, $((SECONDS - began)) s"; grep -v '^$' "$OUT/$log.log" | tail -n "${LINES_SHOWN:-4}"
}

figures() { # name of the probe, its file
  $PY - "$1" "$2" <<'PY'
import json, sys
name, path = sys.argv[1:]
try:
    found = json.load(open(path))
except OSError as error:
    sys.exit(f"{name}: {error}")
s, p = found["served"], found["predicted"]
a, fresh = s["acceptance"], s["acceptance_without_repeats"]
round3 = lambda values: [round(v, 3) for v in values]
print(f"{name}: {s['engine']}, {s['steps']} steps, {s['prompts']} prompts, {a['verify_passes']} passes, {s['unordered_prompts']} unordered")
print(f"  tau {a['acceptance_length']:.3f} {round3(a['interval'])} marginal {round3(a['marginal'])}")
print(f"  without repeats {fresh and round(fresh['acceptance_length'], 3)}, repeated 8-grams {s['repeated_8gram_share']:.3f}")
if p:
    print(f"  walk {p['acceptance_length']:.3f} {round3(p['interval'])} marginal {round3(p['marginal'])}")
print(f"  R {s['break_even']:.3f} {round3(s['speed']['break_even_interval'])} speed-up {s['speedup']:.3f} {round3(s['speedup_interval'])}")
print(f"  identical to plain {s['plain_identical_share']}, gaps {sorted((d['gap'] if d['gap'] is not None else -1) for d in s['differences'])}")
for r in s["sweep"]:
    print(f"  at {r['concurrency']}: tau {r['acceptance_length']:.3f} R {r['break_even']:.3f} {round3(r['break_even_interval'])} speed-up {r['speedup']:.3f} {round3(r['speedup_interval'])} tok/s {r['plain_tokens_per_second']:.0f} -> {r['speculative_tokens_per_second']:.0f} context {r['mean_context']:.0f}")
print("  by length", {k: round(v["acceptance_length"], 3) for k, v in s["by_prompt_length"].items()}, s["verdict"])
PY
}

compare() { # two probes of the same prompts: marginal acceptance by position, text and passes
  $PY - "$1" "$2" <<'PY'
import json, sys
from ray_eagle.probing.acceptance import acceptance, bootstrap_ratio
import numpy as np
one, other = ({r["id"]: r for r in json.load(open(path))["served"]["rows"]} for path in sys.argv[1:])
ids = [i for i in one if i in other]
rows = [[side[i] for i in ids] for side in (one, other)]
found = [acceptance([r["accepted"] for r in side], ["all"] * len(ids), steps=3) for side in rows]
print(f"on the same {len(ids)} prompts: text equal {sum(a['tokens'] == b['tokens'] for a, b in zip(*rows))}, passes equal {sum(a['accepted'] == b['accepted'] for a, b in zip(*rows))}")
for name, f in zip(("sglang", "reference"), found):
    print(f"  {name}: {f.verify_passes} passes, tau {f.acceptance_length:.3f} {[round(x, 3) for x in f.interval]}")
for k in range(1, 4):
    (a, b), cells = ([f.marginal[k - 1] for f in found], [])
    for side in rows:
        hits, passes = (np.array([g(r["accepted"]) for r in side], float) for g in (lambda js: sum(j >= k for j in js), len))
        cells.append([round(x, 3) for x in bootstrap_ratio(hits, passes, confidence=0.95, resamples=2000, seed=0)])
    print(f"  at least {k}: sglang {a:.3f} {cells[0]}, reference {b:.3f} {cells[1]}")
PY
}

for part in "$@"; do
  date
  case $part in
    learn)
      stage generate generate 300; stage extract extract 200; stage vocab vocab 60; stage train train 300
      tail -n 1 "$RUN/logs/train.jsonl"; cp "$RUN/logs/train.jsonl" "$OUT/" ;;
    serve)
      rm -rf "$RUN/probes/trained"; stage probe probe 540 --redo; figures bfloat16 "$RUN/probes/trained/probe.json"
      cp "$RUN/probes/trained/probe.json" "$OUT/probe-bfloat16.json"; cp "$OUT/probe-bfloat16.json" "$RUN/" ;;
    breakeven)
      rm -rf "$RUN/probes/breakeven"; LINES_SHOWN=8 stage breakeven breakeven 300
      $PY - "$RUN/probe-bfloat16.json" "$RUN/probes/breakeven/breakeven.json" <<'PY'
import json, sys
trained, random = (json.load(open(path)) for path in sys.argv[1:])
needed = {(r["steps"], r["concurrency"]): (r["needed"], r["mean_context"]) for r in random["measured"]["rows"]}
for r in trained["served"]["sweep"]:
    n, context = needed[r["steps"], r["concurrency"]]
    print(f"  at {r['concurrency']}: R random {n:.3f} (context {context:.0f}), trained {r['break_even']:.3f} ({r['mean_context']:.0f}): {n / r['break_even'] - 1:+.1%}")
PY
      cp "$RUN/probes/breakeven/breakeven.json" "$OUT/" ;;
    exact)
      # each has a private cluster of its own and half of the cores; the reference engine's copy of the run keeps its probe apart
      rm -rf "$RUN-reference" "$RUN/probes/trained"; cp -r "$RUN" "$RUN-reference"
      stage probe probe-float16 400 --redo --serve.dtype float16 --probe.concurrencies '[1]' &
      (RUN="$RUN-reference" stage probe probe-reference 540 --redo --serve.engine reference --serve.dtype float16 \
        --probe.concurrencies '[1]' --breakeven.concurrencies '[1]' --probe.limit 100 --probe.plain_prompts 2)
      wait
      figures float16 "$RUN/probes/trained/probe.json"; figures reference "$RUN-reference/probes/trained/probe.json"
      compare "$RUN/probes/trained/probe.json" "$RUN-reference/probes/trained/probe.json"
      cp "$RUN/probes/trained/probe.json" "$OUT/probe-float16.json"
      cp "$RUN-reference/probes/trained/probe.json" "$OUT/probe-reference.json" ;;
  esac
done
date
for log in $(ls -t /tmp/ray_eagle-*/servers/*.log 2>/dev/null | head -3); do tail -n 60 "$log" >"$OUT/server-$(basename "$log")"; done
nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null
$PY -c "from ray_eagle.serving.supervisor import owned; print('left behind:', owned())"
