#!/bin/sh
# Checks everything that needs a GPU, in about fifteen minutes: the end-to-end suite in bfloat16, the agreement of
# trainer and sampler, a trainer and a sampler that are killed, the demo, RL with images, the control plane, and where
# there are several GPUs the agreement on all of them and their scaling. Needs python3 with torch, vLLM and the project's
# other dependencies; imports the project from this checkout. Prints a summary at the end.
#   sh scripts/gpu_check.sh [OUT]      OUT: folder for the logs (default: runs/gpu)
#   ONLY=vision_rl sh ...              only one step
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/runs/gpu}
mkdir -p "$out"
export PYTHONPATH="$root/packages/types/src:$root/packages/client/src:$root/packages/backend/src${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
cd "$root" || exit 1
summary=$out/summary.txt
: >"$summary"

step() {  # NAME SECONDS COMMAND...
    name=$1 limit=$2
    shift 2
    [ "${ONLY:-$name}" = "$name" ] || return
    began=$(date +%s)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    echo "$name: status $status, $(($(date +%s) - began)) s" | tee -a "$summary"
    [ $status -eq 0 ] || tail -n 25 "$out/$name.log" >>"$summary"
}

seen=${CUDA_VISIBLE_DEVICES-}
export CUDA_VISIBLE_DEVICES="${seen:-0}"  # one GPU, until the steps for several
{
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    python3 -c "import torch, transformers, vllm, sys; print('python', sys.version.split()[0], 'torch', torch.__version__, 'transformers', transformers.__version__, 'vllm', vllm.__version__)"
} 2>/dev/null | tee -a "$summary"
step agreement 240 python3 -m pytest tests/e2e/test_agreement.py -q -s -p no:cacheprovider
grep -hE 'effect of training|KL\(sampler' "$out/agreement.log" | sed 's/^\.//' >>"$summary"
step same_numbers 200 python3 -m pytest tests/e2e/test_http_equals_in_process.py -q -s -p no:cacheprovider
step restarts 200 python3 -m pytest tests/e2e/test_trainer_restarts.py -q -s -p no:cacheprovider
grep -h 'after the kill' "$out/restarts.log" >>"$summary"
step sampler_restarts 200 python3 -m pytest tests/e2e/test_sampler_restarts.py -q -s -p no:cacheprovider
grep -hE 'started in|after it' "$out/sampler_restarts.log" >>"$summary"
step demo 240 python3 examples/demo.py --out "$out/demo"
grep -E '│|┃|accuracy' "$out/demo.log" >>"$summary"
step vision_rl 400 python3 -m pytest tests/e2e/test_vision_rl.py tests/examples/test_examples_rl.py -q -s -p no:cacheprovider
grep -hE 'KL|return on|passed|failed' "$out/vision_rl.log" >>"$summary"
step control_plane 150 python3 benchmarks/control_plane.py
grep -E '│|┃' "$out/control_plane.log" >>"$summary"
if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ]; then
    if [ -n "$seen" ]; then export CUDA_VISIBLE_DEVICES="$seen"; else unset CUDA_VISIBLE_DEVICES; fi
    step all_gpus 400 python3 -m pytest tests/e2e/test_agreement.py -q -s -p no:cacheprovider
    grep -hE 'effect of training|KL\(sampler' "$out/all_gpus.log" | sed 's/^\.//' >>"$summary"
    step scaling 580 python3 benchmarks/scaling.py --log "$out/scaling_ranks.log" --out "$out"
    grep -E '│|┃' "$out/scaling.log" >>"$summary"
fi
echo "==== summary"
cat "$summary"
