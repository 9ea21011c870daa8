#!/bin/bash
# The second GPU run of `gpu` (at most 108 s): bash .gpu-scripts/second.sh [SECONDS]. Needs $OUT; brings $OUT/gpu2.tar.gz, prints a table.
cd "$(dirname "$0")/.."
export PYTHONPATH=src:.:.gpu-deps PYTHONUNBUFFERED=1
RES=/tmp/gpu-results-2; mkdir -p $RES; BEGAN=$SECONDS; DEADLINE=$((BEGAN + ${1:-104}))
say() { echo "[$((SECONDS - BEGAN)) s] $*"; tar czf "${OUT:-/tmp}/gpu2.tar.gz" -C $RES . 2> /dev/null; }
part() {  # name, seconds at most, command; left out where the time is over
  local name=$1 limit=$2 left=$((DEADLINE - SECONDS)); shift 2
  [ $left -lt 8 ] && { say "$name: no time"; return; }
  timeout -k 2 $((limit < left ? limit : left)) "$@" > $RES/$name.log 2>&1; say "$name: rc $?"
}
python3 .gpu-scripts/data.py /tmp/gpu-data > /dev/null 2>&1 &
# A. Tests and builds, side by side
timeout -k 2 66 python3 -m pytest tests/gpu/test_step_graph_cuda.py tests/gpu/test_parts_cuda.py tests/gpu/test_optim_cuda.py -m gpu -v -n 6 --dist worksteal \
  -p no:benchmark -p no:cacheprovider --tb=short \
  -k "several_steps or recorded_steps or a_run or not_finite or nobody_waits or gradients_that_move or (cuda_equals_cpu and bfloat16 and (sgd or adamw))" > $RES/tests.log 2>&1 & TESTS=$!
BUILD=()
for algorithm in AdamW SGD; do for update in stochastic kahan; do
  timeout -k 2 55 python3 -m benchmarks optim --device cuda --algorithms $algorithm --layouts ResNet-50 --no-peers --build \
    --only "lowp $algorithm bf16 $update" > $RES/build-$algorithm-$update.log 2>&1 & BUILD+=($!)
done; done
for steps in 8 4; do
  timeout -k 2 60 env LOWP_PART_STEPS=$steps python3 -m benchmarks wire_cuda --part bucket --only 'e5m2|e2m1|mx' --timeout 56 --out /tmp/gpu-warm-$steps > $RES/warm-$steps.log 2>&1 & BUILD+=($!)
done
wait $TESTS; say "tests: rc $?"; grep -E "FAILED|^E  |passed|failed" $RES/tests.log | cut -c1-200 | tail -25
wait ${BUILD[@]}; say "built"
# B. Measurements, one after the other
part optim 30 python3 -m benchmarks optim --device cuda --algorithms AdamW SGD --layouts ResNet-50 --no-peers --rounds 7 \
  --only "lowp (AdamW|SGD) bf16 (stochastic|kahan)" --out $RES/optim
for steps in 8 4; do
  part bucket-$steps 20 env LOWP_PART_STEPS=$steps python3 -m benchmarks wire_cuda --part bucket --only 'e5m2|e2m1|mx' --timeout 17 --out $RES/bucket-$steps
done
part train 25 python3 -m benchmarks train --device cuda --only 'cnn' --sections overhead --rounds 2 --seconds 0.7 --data /tmp/gpu-data --out $RES/train
say "done"
grep -h "device time\|wall time" $RES/optim/*.md | cut -c1-140
grep -h "^| e\|^| mx" $RES/bucket-*/*.md; grep -h "^| cnn" $RES/train/*.md
