#!/usr/bin/env bash
# Runs a module of dprjax on all hosts of a Cloud TPU slice, again until it is done. From a clone of the repository:
#
#   launch/tpu_pod.sh -m dprjax.train --config=configs/dptdr.py:msmarco --workdir=gs://BUCKET/runs/msmarco --config.data.dir=gs://BUCKET/msmarco
#   launch/tpu_pod.sh status | log | stop | delete
#
# It requests a slice as a queued resource, waits for it, installs the last commit, starts Python with these arguments on
# every host, and watches. Steps that are done are skipped: the same command again, after an interruption or from another
# machine, goes on watching the run. After preemption it requests a new slice, and training goes on from the workdir.
# `stop` saves and ends the run; only `delete` ends the costs. It needs gcloud, logged in, with the TPU API enabled. It is
# not for TPU7x, which only GKE has (gke_jobset.yaml).
set -euo pipefail

# ---- The one place to edit; environment variables override it. ---------------------------------------------------------
: "${NAME:=dprjax}"
: "${PROJECT:=my-project}"
: "${ZONE:=us-east5-b}"
: "${TYPE:=v6e-16}"                     # gcloud compute tpus accelerator-types list --zone=ZONE
: "${RUNTIME:=v2-alpha-tpuv6e}"         # v5e: v2-alpha-tpuv5-lite, v5p: v2-alpha-tpuv5, v4: tpu-ubuntu2204-base
: "${FLAGS:=--spot}"                    # of `queued-resources create`: --spot, --reserved, --service-account=..., --valid-until-duration=6h
: "${CRASHES:=3}"                       # restarts after crashes; never after bad input (status 2), always after preemption
: "${PAUSE:=30}"                        # seconds between checks
# Installs dprjax in its source folder. The images have Python 3.10; uv fetches a newer one. gcsfs is for gs://.
: "${INSTALL:=python3 -m pip install --quiet --user uv && ~/.local/bin/uv venv --quiet --clear --python 3.12 .venv && \
~/.local/bin/uv pip install --quiet --python .venv -c constraints/py312.txt -e '.[tpu]' gcsfs}"
# ------------------------------------------------------------------------------------------------------------------------

say() { echo "$(date '+%F %T') tpu_pod.sh: $*" >&2; }

queued() { gcloud compute tpus queued-resources "$1" "${@:2}" --project="$PROJECT" --zone="$ZONE" --quiet; }

# Runs a line of shell on every host and prints their output, in any order.
on_all() { queued ssh "$NAME" --node=all --worker=all --command="$1" </dev/null; }

# The state of the queued resource, or "none".
state() {
  local said
  if said=$(queued describe "$NAME" --format='value(state.state)' 2>&1); then
    tail -n 1 <<<"$said"
  elif grep -q NOT_FOUND <<<"$said"; then
    echo none
  else
    say "gcloud: $said"
    exit 1
  fi
}

have_slice() {
  local now before=''
  while now=$(state); [[ $now != ACTIVE ]]; do
    [[ $now == "$before" ]] || say "slice $NAME ($TYPE, $ZONE): $now"
    before=$now
    case $now in
      none)
        # shellcheck disable=SC2086  # several words
        queued create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$RUNTIME" $FLAGS ;;
      SUSPENDED | FAILED) queued delete "$NAME" --force ;;   # preempted, or never granted: frees the name
    esac
    sleep "$PAUSE"
  done
}

have_code() {
  local commit archive
  commit=$(git rev-parse HEAD)
  [[ -z $(git status --porcelain --untracked-files=no) ]] || say 'there are changes that are not committed: they do not go along'
  if [[ $(on_all "[ \"\$(cat ~/dprjax/.installed 2>/dev/null)\" = $commit ] || echo lacks-it") != *lacks-it* ]]; then
    return
  fi
  say "installing commit $commit on all hosts"
  archive=$(mktemp -d)/dprjax.tar.gz
  git archive --output="$archive" HEAD &&
    queued scp "$archive" "$NAME:" --node=all --worker=all </dev/null &&
    rm -r "${archive%/*}" &&
    on_all "mkdir -p ~/dprjax && tar -xzf ~/dprjax.tar.gz -C ~/dprjax && cd ~/dprjax && $INSTALL && echo $commit >.installed"
}

# The process outlives the connection; its status is kept beside its log. When a host shuts down, SIGTERM also reaches the
# shell around the process, which waits.
start() {
  local body
  body="trap : TERM; .venv/bin/python$(printf ' %q' "$@"); echo \$? >status"
  on_all "cd ~/dprjax || exit 1
    if [ ! -e status ] && [ -e pid ] && kill -0 \$(cat pid) 2>/dev/null; then echo it runs already; exit 0; fi
    rm -f status stopped
    setsid nohup bash -c $(printf '%q' "$body") >>log 2>&1 </dev/null &
    echo \$! >pid"
}

# One line per host: "state running", "state lost" (ended without a status), "state STATUS", or "state stopped" by `stop`.
states() {
  # shellcheck disable=SC2016  # expanded on the host
  on_all 'cd ~/dprjax 2>/dev/null || { echo state lost; exit 0; }
    if [ -e status ]; then if [ -e stopped ]; then echo state stopped; else echo "state $(cat status)"; fi
    elif [ -e pid ] && kill -0 $(cat pid) 2>/dev/null; then echo state running
    else echo state lost; fi' | grep '^state ' | cut -d' ' -f2 | sort | uniq
}

# 0: done; 2, 143: as for the processes; 1: crashed; 75: the slice is gone.
watch() {
  local now
  while sleep "$PAUSE"; do
    if ! now=$(states) || [[ -z $now ]]; then
      [[ $(state) == ACTIVE ]] || return 75
      say 'the hosts do not answer; trying again'
    elif [[ $now == 0 ]]; then
      return 0
    elif [[ $now != *running* ]]; then
      say "the processes ended: $(tr '\n' ' ' <<<"$now")"
      if grep -qx stopped <<<"$now"; then return 143; fi
      if grep -qx 2 <<<"$now"; then return 2; fi
      if grep -qx 143 <<<"$now"; then return 75; fi   # SIGTERM, but not by us: the slice is about to go
      [[ $(state) == ACTIVE ]] || return 75           # taken away between a host's answer and another's
      return 1
    fi
  done
}

run() {
  local crashes=0 status
  while :; do
    have_slice
    if ! { have_code && start "$@"; }; then
      [[ $(state) != ACTIVE ]] || { say 'gcloud says above what went wrong'; return 1; }
      say 'preempted: starting again'
      continue
    fi
    say "running; 'launch/tpu_pod.sh log' shows what it says"
    status=0
    watch || status=$?
    case $status in
      0) say "done; the slice is still there: launch/tpu_pod.sh delete"; return 0 ;;
      2) say "bad input: launch/tpu_pod.sh log"; return 2 ;;
      143) say 'stopped'; return 143 ;;
      75) say 'preempted: starting again' ;;
      *)
        ((++crashes <= CRASHES)) || { say "crashed $crashes times: launch/tpu_pod.sh log"; return 1; }
        say 'crashed: starting again' ;;
    esac
  done
}

case ${1:-} in
  status) echo "slice: $(state)"; states ;;
  log) queued ssh "$NAME" --node=0 --worker=0 --command='tail -n 100 -f ~/dprjax/log' ;;
  # The shell and Python are one process group.
  stop) on_all "cd ~/dprjax && touch stopped && kill -TERM -- -\$(cat pid)" ;;
  delete) queued delete "$NAME" --force ;;
  -*) run "$@" ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
