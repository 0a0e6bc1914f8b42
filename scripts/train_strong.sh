#!/usr/bin/env bash
# Train the strongest network that two cores can train in a night: a ResNet-18 of half the usual width.
#
#   scripts/train_strong.sh DIR     the runs go to DIR/first and DIR/second; run it again to go on
#
# Its weights are DIR/second/weights.safetensors: 11 MB, too large to ship. docs/results.md reports
# it. The second run begins with the weights of the first, which was cut short (a warm restart). On
# one core that has bfloat16 instructions they take 80 and 120 minutes; on others leave out
# --bfloat16.
set -euo pipefail
to=${1:?where the runs go, such as /tmp/strong}
ttapca=$(dirname "$0")/../.venv/bin/ttapca
export OMP_WAIT_POLICY=PASSIVE # waiting threads sleep instead of spinning
common=(cifar10 resnet18-cifar-32 --cutout 8 --label-smoothing 0.1 --bfloat16)
"$ttapca" train "${common[@]}" --to "$to/first" --epochs 16 --seed 0
"$ttapca" train "${common[@]}" --to "$to/second" --start "$to/first/weights.safetensors" \
    --epochs 24 --schedule cosine --warmup 1 --peak 0.1 --seed 1
