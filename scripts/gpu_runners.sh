#!/bin/sh
# Compares vLLM's two model runners on a GPU: the tests of sampling, of families and of adapters on each, and tokens/s of
# servers of both in turns, beside vLLM alone on both. V2 may become the default if its tests pass and it has at least
# 0.98 of V1's tokens/s. Needs what gpu_check.sh needs, with vLLM 0.32 or newer. Half an hour; ONLY=tests or ONLY=speed.
#   sh scripts/gpu_runners.sh [OUT]      OUT: folder for the logs (default: runs/runners)
#   PYTHON=/path/to/python sh ...        the Python with the dependencies (default: python3)
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/runs/runners}
python=$(command -v "${PYTHON:-python3}") || exit 1
case $python in /*) ;; *) python=$PWD/$python ;; esac
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$root/packages/types/src:$root/packages/client/src:$root/packages/backend/src${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
unset TRITON_INTERPRET
cd "$root" || exit 1
summary=$out/summary.txt
: >"$summary"

step() {  # NAME SECONDS COMMAND...
    name=$1 limit=$2
    shift 2
    began=$(date +%s)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    echo "$name: status $status, $(($(date +%s) - began)) s, $(tail -n 1 "$out/$name.log")" | tee -a "$summary"
    grep -E '^(FAILED|ERROR)' "$out/$name.log" >>"$summary"
}

# A stack of benchmarks/stacks.py is a Python: here the same one, with another runner.
for runner in 0 1; do
    printf '#!/bin/sh\nVLLM_USE_V2_MODEL_RUNNER=%s exec "%s" "$@"\n' "$runner" "$python" >"$out/runner$runner"
    chmod +x "$out/runner$runner"
done

if [ "${ONLY:-tests}" = tests ]; then
    for runner in 0 1; do
        run="$out/runner$runner -m pytest -q -p no:cacheprovider -p no:xdist"
        step "sampling$runner" 900 $run tests/sampling
        # An adapter on each target of each family; servers of models that see. The other files of tests/families compare
        # with a trainer in float32 on a CPU.
        step "families$runner" 900 $run tests/families/test_families_on_gpu.py tests/e2e/test_models_that_see_on_gpu.py
        step "agreement$runner" 300 $run tests/e2e/test_agreement.py tests/e2e/test_sampler_restarts.py
    done
fi
if [ "${ONLY:-speed}" = speed ]; then
    step speed 1200 "$python" benchmarks/stacks.py "v1=$out/runner0" "v2=$out/runner1" --only sampling alone --out "$out"
    grep -E '│|┃|tokens' "$out/speed.log" >>"$summary"
fi
echo "==== summary"
cat "$summary"
