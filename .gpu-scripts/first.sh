#!/bin/bash
# The first GPU run of issue 14 (at most 6 minutes): bash .gpu-scripts/first.sh. Needs $OUT. Brings $OUT/gpu.tar.gz and a table.
cd "$(dirname "$0")/.."
export PYTHONPATH=src:.:.gpu-deps PYTHONUNBUFFERED=1 LOWP_TURNS=/tmp/gpu-turns
RES=/tmp/gpu-results; mkdir -p $RES; BEGAN=$SECONDS
say() { echo "[$((SECONDS - BEGAN)) s] $*"; }
part() { local name=$1 limit=$2; shift 2; timeout -k 5 "$limit" "$@" > $RES/$name.log 2>&1; say "$name: rc $?"; }
exec 9> $LOWP_TURNS; flock 9  # nobody measures yet

# A. Everything that compiles, side by side
part data 60 python3 .gpu-scripts/data.py /tmp/gpu-data &
SIM=()
for case in resnet18 gpt; do for mode in default reduce-overhead; do
  timeout -k 5 330 python3 -m benchmarks simulate --device cuda --only $case --dtype bfloat16 --mode $mode --contenders simulated,\ compiled \
    --rounds 5 --seconds 0.4 --out $RES/simulate-$case-$mode > $RES/simulate-$case-$mode.log 2>&1 9>&- & SIM+=($!)
done; done
VAR=()
for case in "AdamW:bf16:kahan" "AdamW:bf16:kahan, e4m3fn" "AdamW:bf16:stochastic, dynamic8" "SGD:bf16:kahan" "SGD:bf16:kahan, e4m3fn"; do
  timeout -k 5 300 python3 .gpu-scripts/variants.py "$case" "$RES/variants-${case//[^a-zA-Z0-9]/_}.json" > "$RES/variants-${case//[^a-zA-Z0-9]/_}.log" 2>&1 9>&- & VAR+=($!)
done
BUILD=()
for algorithm in AdamW SGD; do for weights in bf16 fp16; do
  timeout -k 5 150 python3 -m benchmarks optim --device cuda --algorithms $algorithm --layouts ResNet-50 --no-peers --build \
    --only "lowp $algorithm $weights (stochastic|kahan)" > $RES/build-$algorithm-$weights.log 2>&1 9>&- & BUILD+=($!)
done; done
timeout -k 5 120 python3 -m pytest tests/gpu/test_step_graph_cuda.py tests/gpu/test_optim_cuda.py -m gpu -q -n 6 -p no:benchmark -p no:cacheprovider --timeout 110 --maxfail 12 \
  -k "several_steps or (cuda_equals_cpu and (sgd or adamw)) or recorded_steps or a_run" > $RES/tests.log 2>&1 9>&- & TESTS=$!
wait ${BUILD[@]}; say "optimizers built"
wait $TESTS; say "tests: rc $?"; tail -4 $RES/tests.log

# B. Measurements, one after the other
part optim 80 python3 -m benchmarks optim --device cuda --algorithms AdamW SGD --layouts ResNet-50 --no-peers --rounds 5 \
  --only "lowp (AdamW|SGD) (bf16|fp16) (stochastic|kahan)" --out $RES/optim
flock -u 9; wait ${VAR[@]} ${SIM[@]}; say "variants, simulate"; flock 9
part train 70 env -u LOWP_TURNS python3 -m benchmarks train --device cuda --sections overhead --rounds 3 --seconds 1.5 --data /tmp/gpu-data --out $RES/train
part train-eager 60 env -u LOWP_TURNS python3 -c "
import lowp.training.step_graph as s; s.EAGER_STEPS = 10**9
import sys; sys.argv = ['benchmarks train'] + '--device cuda --sections overhead --rounds 2 --seconds 1 --data /tmp/gpu-data --out $RES/train-eager'.split()
from benchmarks.train import main; main()"
part bucket 60 python3 -m benchmarks wire_cuda --part bucket --timeout 55 --out $RES/bucket
part step 75 python3 -m benchmarks wire_cuda --part step --models gpt2-medium --rounds 5 --seconds 25 --timeout 70 --out $RES/step
part fsdp 75 python3 -m benchmarks wire_cuda --part fsdp --models gpt2 --rounds 3 --mps --timeout 70 --out $RES/fsdp
part operations 50 python3 -m benchmarks operations --device cuda --only 'mx|nv' --sections numbers --no-peers --rounds 5 --out $RES/operations
tar czf "${OUT:-/tmp}/gpu.tar.gz" -C $RES .
say "done"
cat $RES/variants-*.log | grep device
grep -h "^| " $RES/optim/*optim.md $RES/train/*.md $RES/simulate-*/*.md $RES/bucket/*.md $RES/step/*.md $RES/fsdp/*.md 2>/dev/null | cut -c1-150
