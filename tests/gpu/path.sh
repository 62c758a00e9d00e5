# The whole path on one NVIDIA GPU: bash tests/gpu/path.sh learn|serve|breakeven|exact ...   (after `. /tmp/gpu/env.sh`)
#   learn      generate, extract, train                                  about 5 min
#   serve      probe with SGLang in bfloat16 at concurrency 1, 4, 16     about 5 min
#   breakeven  the same with a random drafter                            about 3 min
#   heavy      the same drafter before a target that answers like SmolLM2 with many times its work    about 5 min
#   heavy-breakeven                                     a random one before it                        about 5 min
#   exact      float16: SGLang's text against plain decoding             about 3 min
# Settings: path.yaml, and whatever $EXTRA adds. Logs, probe.json, breakeven.json and SGLang's logs go to $OUT.
export HF_HUB_OFFLINE=1 TQDM_DISABLE=1 RAY_AUTH_MODE=disabled OUT=${OUT:-/tmp/run/out}
HEAVY=${HEAVY:-/tmp/gpu/model/heavy}
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

compare() { # a probe, a break-even: R with a trained drafter and with a random one, once both are there
  [ -e "$1" ] && [ -e "$2" ] || return 0
  $PY - "$@" <<'PY'
import json, sys
trained, random = (json.load(open(path)) for path in sys.argv[1:])
rows = {(r["steps"], r["concurrency"]): r for r in random["measured"]["rows"]}
for r in trained["served"]["sweep"]:
    c, other = r["concurrency"], rows[r["steps"], r["concurrency"]]
    step = c / r["plain_tokens_per_second"]
    print(f"  at {c}: R random {other['needed']:.3f} (context {other['mean_context']:.0f}), trained {r['break_even']:.3f} ({r['mean_context']:.0f}): {other['needed'] / r['break_even'] - 1:+.1%}")
    print(f"    ms of a plain step, a cycle: random {1e3 * other['speed']['plain_step_seconds']:.3f}, {1e3 * other['speed']['cycle_seconds']:.3f}; trained {1e3 * step:.3f}, {1e3 * step * r['break_even']:.3f}")
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
      rm -rf "$RUN/probes/breakeven"; LINES_SHOWN=8 stage breakeven breakeven 450
      compare "$RUN/probe-bfloat16.json" "$RUN/probes/breakeven/breakeven.json"
      cp "$RUN/probes/breakeven/breakeven.json" "$OUT/" ;;
    heavy | heavy-breakeven)
      [ -e "$HEAVY/config.json" ] || $PY -m tests.gpu.heavy ${SOURCE:-/tmp/gpu/model/target} "$HEAVY" $HEAVY_SIZE
      given="--target.path $HEAVY --drafter.path $RUN/drafter --serve.memory_share 0.42 --redo"
      given="$given --probe.limit 32 --probe.plain_prompts 32 --probe.max_new_tokens 64 --breakeven.prompts 32 --breakeven.max_new_tokens 64"
      # capturing prefill's graphs of so many layers takes SGLang two minutes
      args='["--attention-backend","triton","--sampling-backend","pytorch","--grammar-backend","none","--max-total-tokens","65536","--disable-prefill-cuda-graph"]'
      if [ $part = heavy ]; then
        RUN=$RUN-heavy stage probe probe-heavy 400 $given --serve.args "$args"
        figures heavy "$RUN-heavy/probes/given/probe.json"; cp "$RUN-heavy/probes/given/probe.json" "$OUT/probe-heavy.json"
      else
        RUN=$RUN-heavy LINES_SHOWN=8 stage breakeven breakeven-heavy 400 $given --serve.args "$args"
        cp "$RUN-heavy/probes/breakeven/breakeven.json" "$OUT/breakeven-heavy.json"
      fi
      compare "$RUN-heavy/probes/given/probe.json" "$RUN-heavy/probes/breakeven/breakeven.json" ;;
    exact)
      rm -rf "$RUN/probes/trained"; stage probe probe-float16 400 --redo --serve.dtype float16 --probe.concurrencies '[1]'
      figures float16 "$RUN/probes/trained/probe.json"
      cp "$RUN/probes/trained/probe.json" "$OUT/probe-float16.json"
      # what `python3 -m tests.gpu.reference` needs elsewhere, in pieces that a transfer takes
      cp "$RUN/drafter/config.json" "$OUT/"; split -b 15000000 "$RUN/drafter/model.safetensors" "$OUT/model.safetensors." ;;
  esac
done
date
for log in $(ls -t /tmp/ray_eagle-*/servers/*.log 2>/dev/null | head -3); do tail -n 60 "$log" >"$OUT/server-$(basename "$log")"; done
nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null
$PY -c "from ray_eagle.serving.supervisor import owned; print('left behind:', owned())"
