#!/bin/sh
# Prints one of the settings under which torch, oneDNN and MKL compute with other kernels, as NAME=VALUE: one that this
# processor has, chosen by the commit. Sums are rounded differently under each, as on another processor.
#   sh scripts/cpu_kernels.sh [COMMIT]    by default the one that is checked out; without git the first setting
#   CPUINFO                               what the processor has, by default /proc/cpuinfo
set -eu

flags=" $(sed -n 's/^flags[^:]*: //p' "${CPUINFO:-/proc/cpuinfo}" | head -n 1) "

has() {
    for flag; do
        case $flags in *" $flag "*) ;; *) return 1 ;; esac
    done
}

# With AMX, libraries that may not use it still choose it for bfloat16: products fail or end the process.
settings=MKL_CBWR=COMPATIBLE
if ! has amx_bf16; then
    settings="$settings ATEN_CPU_CAPABILITY=default"
    if has avx2 fma; then settings="$settings ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2"; fi
    if has avx512f avx512bw avx512vl avx512dq fma; then
        settings="$settings ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE"
    fi
fi

commit=${1:-$(git rev-parse HEAD 2>/dev/null || echo 0)}
set -- "$(printf %.7s "$commit")" $settings
chosen=$((0x$1 % ($# - 1) + 1))
shift "$chosen"
echo "$1"
