#!/usr/bin/env bash
# Everything to know of one GPU, in nine minutes on a machine without a network.
#
#   benchmarks/gpu.sh --pack       here: what such a machine lacks, in benchmarks/wheels (64 MB at most)
#   benchmarks/gpu.sh              there: installs it and measures, the most important part first
#   benchmarks/gpu.sh --rehearse   on a processor, with small sizes
#
# The machine has Python 3.12, jax, flax, optax, orbax-checkpoint, transformers, torch and
# sentence-transformers. PYTHON names another interpreter. Each part has a time limit and writes its
# result at once, to $OUT or benchmarks/results; gpu.log has the output. $DATA is a folder with
# scifact (BEIR); without it the last but one part is left out.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
DATA=${DATA:-../shared/data}
WHEELS=benchmarks/wheels
# What the measured commands import beside the packages above. pyarrow makes most of the size: this
# is the oldest version that the tests run on.
PACKAGES='array-record attrs bm25s dm-tree docstring-parser googleapis-common-protos grain
  immutabledict ir-measures jaxtyping ml-collections more-itertools msgspec portpicker PyStemmer
  pytrec-eval-terrier sentencepiece simple-parsing six tensorflow-datasets tensorflow-metadata toml
  wadler-lindig wrapt'
PYARROW=pyarrow==23.0.0

pack() {
  mkdir -p "$WHEELS"
  local target='--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none'
  for platform in 2_28 2_27 2_24 2_17; do target+=" --platform manylinux_${platform}_x86_64"; done
  # shellcheck disable=SC2086 (words)
  "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: $target --platform manylinux2014_x86_64 \
    -c constraints/py312.txt -d "$WHEELS" $PACKAGES
  # shellcheck disable=SC2086
  "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: $target -d "$WHEELS" "$PYARROW"
  "$PYTHON" -m pip wheel --quiet --no-deps -c constraints/py312.txt -w "$WHEELS" promise
  du -sm "$WHEELS"
}

# run SECONDS NAME COMMAND...: one part, within its time and that of all.
run() {
  local seconds=$1 name=$2 began=$SECONDS status=0 left=$((MOST - SECONDS))
  shift 2
  ((left > 0)) || { echo "$name: no time left" | tee -a "$OUT/gpu.log" && return; }
  ((seconds <= left)) || seconds=$left
  timeout --kill-after=5 "$seconds" "$@" >>"$OUT/gpu.log" 2>&1 || status=$?
  case $status in
    0) echo "$name: done after $((SECONDS - began)) s" ;;
    124 | 137) echo "$name: cut off after $seconds s" ;;
    *) echo "$name: failed with status $status" ;;
  esac | tee -a "$OUT/gpu.log"
}

measure() {
  local small=() step=(--runs=5)
  MOST=530 SITE=$(mktemp -d)
  trap 'rm -rf "$SITE"' EXIT
  if [[ $1 == rehearse ]]; then
    export JAX_PLATFORMS=cpu
    MOST=3600
    step=(--size=tiny --queries=4 --prompt=4 --runs=1 --compile=false --dtype=bfloat16)
    small=(--runs=1)
  fi
  OUT=$(realpath -m "${OUT:-benchmarks/results}")
  mkdir -p "$OUT"
  export BENCHMARK_RESULTS=$OUT PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
  export PYTHONPATH="$PWD:$PWD/benchmarks:$SITE:${PYTHONPATH:-}"
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$SITE" "$WHEELS"/*.whl
  echo "installed after $SECONDS s" | tee "$OUT/gpu.log"

  # 1. Updates beside PyTorch compiled, with MFU.
  if [[ $1 == rehearse ]]; then
    run 300 'updates' "$PYTHON" benchmarks/step.py "${step[@]}"
  else
    run 75 'updates, base, P=32' "$PYTHON" benchmarks/step.py "${step[@]}" --size=base --prompt=32
    run 90 'updates, large, P=128' "$PYTHON" benchmarks/step.py "${step[@]}" --size=large --prompt=128
    run 45 'updates, base, P=128' "$PYTHON" benchmarks/step.py "${step[@]}" --size=base --prompt=128 \
      --methods=DPT
    run 60 'updates, large, P=32' "$PYTHON" benchmarks/step.py "${step[@]}" --size=large --prompt=32 \
      --methods=DPT
  fi
  # 2. Encoding beside sentence-transformers.
  if [[ $1 == rehearse ]]; then
    run 200 'encode' "$PYTHON" benchmarks/encode.py --backbone=random:tiny --texts=16 --runs=1 \
      --max_length=64
  else
    run 60 'encode' "$PYTHON" benchmarks/encode.py --backbone=random:base --texts=4096 --runs=3
  fi
  # 3. Attention by XLA and by cuDNN.
  if [[ $1 == rehearse ]]; then
    run 200 'attention' "$PYTHON" benchmarks/attention.py --tokens=128 --lengths=64 "${small[@]}"
  else
    run 60 'attention' "$PYTHON" benchmarks/attention.py
  fi
  # 4. Exact search beside torch.topk.
  if [[ $1 == rehearse ]]; then
    run 100 'top_k' "$PYTHON" benchmarks/top_k.py --passages=2000 --dimension=64 "${small[@]}"
  else
    run 45 'top_k' "$PYTHON" benchmarks/top_k.py
  fi
  # 5. From texts to a result: the default training on SciFact. Weights are random: it is timed.
  if [[ -d $DATA/scifact ]]; then
    run 60 'backbone' "$PYTHON" -c "
import pathlib, sys, made
from dprjax.text.vector_spec import same_length
spec = same_length(256, pooling='mean', normalize=True)
made.backbone_folder(pathlib.Path(sys.argv[1]), made.SHAPES[sys.argv[2]], spec)" \
      "$OUT/backbone" "$([[ $1 == rehearse ]] && echo tiny || echo minilm)"
    run "$([[ $1 == rehearse ]] && echo 400 || echo 100)" 'SciFact' "$PYTHON" -m dprjax.train \
      --config="configs/dptdr.py:beir$([[ $1 == rehearse ]] && echo ,local)" \
      --workdir="$OUT/scifact" --config.backbone.path="$OUT/backbone" \
      --config.data.dir="$DATA/scifact" --config.data.dev_split= --config.data.hold_out=0.2 \
      --config.log.to=
  fi
  # 6. Memory of an update of a decoder.
  run 60 'update_memory' "$PYTHON" benchmarks/update_memory.py
  rm -rf "$OUT/scifact" "$OUT/backbone" "$OUT/backbone-tokenizer"
}

case ${1:-} in
  --pack) pack ;;
  --rehearse) measure rehearse ;;
  '') measure gpu ;;
  *) echo 'usage: benchmarks/gpu.sh [--pack | --rehearse]' >&2 && exit 2 ;;
esac
