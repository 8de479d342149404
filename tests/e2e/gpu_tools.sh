#!/usr/bin/env bash
# tools/gpu-bench beside a vla that only says how it was called, and tools/gpu-results on files that are not whole.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir -p "$place/tools" "$place/build-cuda"
cp "$source/tools/gpu-bench" "$source/tools/gpu-results" "$place/tools"
printf '#!/bin/sh\necho "$*" >>"%s/calls"\n' "$place" >"$place/build-cuda/vla"
chmod +x "$place/build-cuda/vla"
cd "$place"
unset VLA_CACHE_DIR CONFIG
git init -q .

fail() { echo "FAIL: $*"; exit 1; }
# calls ARGUMENTS... -- WANTED...: what vla was called with, one string a call
calls() {
  local words=()
  while [ "$1" != -- ]; do words+=("$1"); shift; done
  shift
  rm -f calls
  tools/gpu-bench --out out "${words[@]}" >log 2>&1 || fail "gpu-bench ${words[*]}: $(cat log)"
  diff <(sed 's/^bench --config [^ ]* --out [^ ]* //' calls) <(printf '%s\n' "$@") || fail "gpu-bench ${words[*]}"
}
# refused SAID ARGUMENTS...
refused() {
  local said=$1 code=0
  shift
  rm -f calls
  tools/gpu-bench --out out "$@" >log 2>&1 || code=$?
  [ $code = 2 ] && [ ! -e calls ] && grep -qF -- "$said" log || fail "gpu-bench $*: $code, $(cat log)"
}
calls scan -- "--batches auto --numerics bf16,bf16-sr"
calls scan=8,16:bf16 scan=4 scan=26:fp32,bf16 -- "--batches 8,16 --numerics bf16" "--batches 4 --numerics bf16,bf16-sr" "--batches 26 --numerics fp32,bf16"
calls scan=auto scan=8:bf16-sr -- "--batches auto --numerics bf16,bf16-sr" "--batches 8 --numerics bf16-sr"
calls profile=bf16 memory -- "--batch 26 --numerics bf16 --steps 20 --profile" "--batches 26,32 --numerics bf16 --memory-limit 97.9"
first="--numerics bf16-sr --batch 4 --steps 20"
calls products=4:7 -- "$first" "$first --products 7" "$first" "$first"
for word in scan= scan=0 'scan=8,' scan=8: scan=8:bf17 profile= profile=fp64 products= products=x products=4:0 turns= turns=v9 beside=now,later; do
  refused "'$word': wanted" "$word"
done
refused "'profile=bf16': wanted this stage once" profile=fp32 profile=bf16
refused "'--seconds 5m': wanted a whole number" --seconds 5m scan
refused "'--seconds': wanted a value" --seconds
refused "tools/gpu-bench [--out FOLDER]" scam

# Lines that are cut off or of no known kind are left out; a peer may have measured no peak.
cat >lines.jsonl <<'END'
{"kind":"begin","commit":"0123456789","date":"2026-12-01T00:00:00Z","stages":"turns","processors":"16"}
{"kind":"command","label":"v3","command":"vla bench"}
{"kind":"step","variant":"all switches","numerics":"bf16","batch":26,"global_batch":26,"oom":false,"step_ms":200,"step_ms_least":199,"step_ms_most":201,"samples_per_s":130,"tflops":350,"recompute":"none","loss":{"1":2}}
{"kind":"peer","label":"v3","peer":"gemm_peak","error":"out of memory"}
{"kind":"peer","label":"v3","peer":"step","variant":"V3","B":26,"ms":250,"sps":104}
{"kind":"of another day"}
[1]
5
END
printf '{"kind":"step","num\377' >>lines.jsonl
tools/gpu-results lines.jsonl >tables 2>log || fail "gpu-results: $(cat log)"
grep -qF '| 0123456 | bf16 | 26 | 200.0 | 130.00 | V3 | 250.0 | 104.00 | **1.250** | – |' tables || fail "$(cat tables)"
[ "$(grep -c 'lines.jsonl:[789]: a line that is no JSON object is left out' log)" = 3 ] || fail "$(cat log)"
sed -i 's/"error":"out of memory"/"tflops":700/' lines.jsonl
tools/gpu-results lines.jsonl 2>log >tables
grep -qF '| **1.250** | 50.0 % of 700 |' tables || fail "$(cat tables)"
# A profile whose line of the machine is lost: rates without shares of the peak.
cat >lines.jsonl <<'END'
{"kind":"command","label":"profile","command":"vla bench"}
{"kind":"step","variant":"all switches","numerics":"bf16","batch":26,"oom":false,"profile":{"step_ms":200,"launches_ms":190,"matmul_alone_ms":150,"matmul_share":0.75,"ops":{"matmul":{"calls":3,"ms":100,"flops":5e13,"bytes":1e9},"add":{"calls":2,"ms":10,"flops":0,"bytes":4e10}},"kinds":[]}}
END
tools/gpu-results lines.jsonl >tables || fail "no machine"
grep -qF '| matmul | 3 | – | 100.000 | 52.6 % | 500 TFLOP/s | – |' tables || fail "$(cat tables)"
grep -qF '| add | 2 | – | 10.000 | 5.3 % | 4000 GB/s | – |' tables || fail "$(cat tables)"
if tools/gpu-results none.jsonl >tables 2>log; then fail "a file that is not there"; fi
grep -qF "tools/gpu-results: [Errno 2]" log || fail "$(cat log)"
if tools/gpu-results 2>log; then fail "no file"; fi
grep -qF "FILE.jsonl" log || fail "$(cat log)"
echo "tools/gpu-bench, tools/gpu-results: as they should"
