#!/usr/bin/env bash
# One Ray head on loopback, in the background: the smallest cluster that `ray job submit` reaches.
#
# Only what `start` started is ever ended: processes are recognised by their ancestry, their session and a mark in their
# environment, never by name, so other Ray clusters on the machine live on.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: bash cluster/local.sh start|stop|status

  start   bring up one Ray head on 127.0.0.1, and return when its job API answers
  stop    end that head and everything that runs under it, and nothing else
  status  say whether it runs (exit 0) or not (exit 1)

Environment:
  RAY_EAGLE_PORT            port of the head (default 6379); two heads need two
  RAY_EAGLE_DASHBOARD_PORT  port of the dashboard and the job API (default 8265)
  RAY_EAGLE_NUM_CPUS        logical CPUs (default: the machine's, at least 4)
  RAY_EAGLE_VENV            virtual environment (default: .venv of this checkout, else `ray` from PATH)
  RAY_EAGLE_START_S         seconds to wait for the job API (default 120)
TEXT
}

fail() {
  echo "local.sh: $*" >&2
  exit 1
}

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
port=${RAY_EAGLE_PORT:-6379}
dashboard_port=${RAY_EAGLE_DASHBOARD_PORT:-8265}
start_s=${RAY_EAGLE_START_S:-120}
own=/tmp/ray-eagle-$UID-$port # mode 700; Ray makes its own folder below it world-writable
temp=$own/ray                 # short: Ray's unix sockets lie below it, and their path may have 107 characters
pid_file=$own/head.pid        # one line: pid, start time (a pid may be reused), mark, dashboard port
log=$own/head.log

# Fields of /proc/PID/stat behind the command, which may hold blanks: state ppid pgrp session ... starttime is the 20th.
stat_of() {
  local text
  # Not text=$(<file): where the process has just ended, that ends this shell too, whatever stands behind it.
  { read -r text <"/proc/$1/stat"; } 2>/dev/null || return 1
  read -ra stat_fields <<<"${text##*) }"
  [[ ${stat_fields[0]:-Z} != Z ]]
}

# PID:STARTTIME of every live process that `start` brought about: the head $1 (0: it is dead), its session, bearers of the
# mark $2 in their environment or of a log below $own as their output (Ray's titles overwrite the environment), and all
# descendants of these.
members() {
  local head=$1 mark=$2 entry pid grown=1
  local -A parent=() started=() inside=()
  for entry in /proc/[0-9]*; do
    pid=${entry#/proc/}
    stat_of "$pid" || continue
    parent[$pid]=${stat_fields[1]} started[$pid]=${stat_fields[19]}
    if ((head && (pid == head || stat_fields[3] == head))); then inside[$pid]=1; fi
  done
  while read -r entry; do
    pid=${entry#/proc/} pid=${pid%%/*}
    if [[ -n ${started[$pid]:-} ]]; then inside[$pid]=1; fi
  done < <(
    grep -lzsx "RAY_EAGLE_HEAD=$mark" /proc/[0-9]*/environ || true
    find /proc/[0-9]*/fd/[12] -lname "$own/*" 2>/dev/null || true
  )
  while ((grown)); do
    grown=0
    for pid in "${!parent[@]}"; do
      if [[ -z ${inside[$pid]:-} && -n ${inside[${parent[$pid]}]:-} ]]; then inside[$pid]=1 grown=1; fi
    done
  done
  for pid in "${!inside[@]}"; do echo "$pid:${started[$pid]}"; done
}

# Is the process PID:STARTTIME still the one that was seen?
alive() { stat_of "${1%%:*}" && [[ ${stat_fields[19]} == "${1##*:}" ]]; }

still_alive() {
  local member
  for member in "$@"; do
    if alive "$member"; then echo "$member"; fi
  done
}

# Reads the pid file; true when the head that it names is alive.
running() {
  [[ -f $pid_file ]] && read -r head started mark dashboard_port <"$pid_file" && alive "$head:$started"
}

taken() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

describe() {
  cat <<TEXT
Ray head: pid $head, address 127.0.0.1:$port, dashboard and job API http://127.0.0.1:$dashboard_port, logs $temp/session_latest/logs
Submit a job, for example:
  ray job submit --address http://127.0.0.1:$dashboard_port --working-dir . -- python jobs/preflight.py -c run.yaml
  ray-eagle preflight -c run.yaml --address http://127.0.0.1:$dashboard_port
To join it without a job (ray.address: 127.0.0.1:$port), export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 first.
TEXT
}

find_ray() {
  local venv=${RAY_EAGLE_VENV:-$checkout/.venv}
  if [[ -x $venv/bin/ray ]]; then
    export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv
  elif [[ -n ${RAY_EAGLE_VENV:-} ]]; then
    fail "RAY_EAGLE_VENV=$venv: expected a virtual environment with bin/ray, found none. Name one that has Ray installed."
  elif ! command -v ray >/dev/null; then
    fail "no Ray: expected $venv/bin/ray or \`ray\` on PATH, found neither. Run \`make demo\` once, or set RAY_EAGLE_VENV."
  fi
}

# Waits until the job API answers; ends early when the head dies. Proxies are for other hosts.
wait_for_job_api() {
  python - "$dashboard_port" "$1" "$start_s" <<'PYTHON'
import os, sys, time, urllib.request
port, pid, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
deadline = time.monotonic() + seconds
while time.monotonic() < deadline:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        sys.exit("the head ended")
    try:
        with opener.open(f"http://127.0.0.1:{port}/api/jobs/", timeout=5) as answer:
            if answer.status == 200:
                sys.exit(0)
    except OSError:
        pass
    time.sleep(0.2)
sys.exit(f"no answer from the job API within {seconds:g} s")
PYTHON
}

start() {
  if running; then
    echo "Already running."
    describe
    return
  fi
  find_ray
  local taken_port client_port reason
  for taken_port in "$port" "$dashboard_port"; do
    if taken "$taken_port"; then
      fail "port $taken_port is taken by another process. Set RAY_EAGLE_PORT and RAY_EAGLE_DASHBOARD_PORT to free ports."
    fi
  done
  if [[ -f $pid_file ]]; then end_members; fi # a head that died on its own may have left workers
  rm -rf "$temp" "$log"
  mark=$$-$RANDOM-$(date +%s%N)
  client_port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  (
    unset RAY_ADDRESS RAY_JOB_CONFIG_JSON_ENV_VAR
    export RAY_EAGLE_HEAD=$mark RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
    # The switch under which Ray keeps a node on loopback: else it replaces 127.0.0.1 and listens on every interface.
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
    cd /
    exec setsid ray start --head --block --disable-usage-stats --log-style record \
      --node-ip-address 127.0.0.1 --port "$port" --dashboard-host 127.0.0.1 --dashboard-port "$dashboard_port" \
      --ray-client-server-port "$client_port" --dashboard-agent-listen-port 0 --temp-dir "$temp" --num-cpus "$num_cpus"
  ) </dev/null >"$log" 2>&1 9>&- &
  head=$!
  disown
  stat_of "$head" || fail "the head ended at once. Its log: $(<"$log")"
  started=${stat_fields[19]}
  echo "$head $started $mark $dashboard_port" >"$pid_file"
  if ! reason=$(wait_for_job_api "$head" 2>&1); then
    echo "local.sh: ${reason##*$'\n'}. The end of $log:" >&2
    tail -n 30 "$log" >&2
    end_members
    exit 1
  fi
  describe
}

# Ends everything that the head of the pid file brought about: TERM to the head, KILL to what outlives it.
end_members() {
  local -a seen left=()
  local tick member
  read -r head started mark dashboard_port <"$pid_file"
  if alive "$head:$started"; then
    mapfile -t seen < <(members "$head" "$mark")
    kill -TERM "$head" 2>/dev/null || true
  else
    mapfile -t seen < <(members 0 "$mark") # its pid may be another's by now
  fi
  for ((tick = 0; tick < 100; tick++)); do
    mapfile -t left < <(still_alive "${seen[@]}")
    if ((${#left[@]} == 0)); then break; fi
    if ! alive "$head:$started" && ((tick > 10)); then break; fi
    sleep 0.1
  done
  for ((tick = 0; tick < 50; tick++)); do
    # What was born while the head was ending has its mark, or descends from what was seen.
    mapfile -t left < <({
      still_alive "${seen[@]}"
      members 0 "$mark"
    } | sort -u)
    if ((${#left[@]} == 0)); then
      rm -f "$pid_file"
      return
    fi
    for member in "${left[@]}"; do
      if alive "$member"; then kill -KILL "${member%%:*}" 2>/dev/null || true; fi
    done
    seen+=("${left[@]}")
    sleep 0.1
  done
  fail "these processes survived SIGKILL (in uninterruptible sleep?): ${left[*]}. $pid_file stays; try stop again."
}

stop() {
  if [[ ! -f $pid_file ]]; then
    echo "Not running: nothing to stop ($pid_file does not exist)."
    return
  fi
  end_members
  echo "Stopped: nothing of the head with pid $head is left. Logs stay in $own until the next start."
}

status() {
  if running; then
    describe
  else
    echo "Not running (port $port)."
    exit 1
  fi
}

case ${1:-} in
  start | stop | status) ;;
  -h | --help)
    usage
    exit 0
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac
[[ -d /proc/self ]] || fail "needs Linux (/proc). Elsewhere, run the stages without --address: they bring up Ray themselves."
cpus=$(getconf _NPROCESSORS_ONLN)
num_cpus=${RAY_EAGLE_NUM_CPUS:-$((cpus > 4 ? cpus : 4))}
mkdir -p -m 700 "$own"
[[ -O $own ]] || fail "$own belongs to another user. Choose another RAY_EAGLE_PORT."
if [[ $1 != status ]]; then
  exec 9>"$own/lock"
  flock -w $((start_s + 30)) 9 || fail "another local.sh is busy with this head ($own/lock)."
fi
"$1"
