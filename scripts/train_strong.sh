#!/usr/bin/env bash
# Train the strongest network that two cores can train in a night: a ResNet-18 of half the usual width.
#
#   scripts/train_strong.sh DIR     the runs go to DIR/first, second and third; run it again to go on
#
# Its weights are DIR/third/weights.safetensors: 11 MB, too large to ship. docs/results.md reports
# it. Each run begins with the weights of the one before (a warm restart), the first of which was cut
# short. On one core that has bfloat16 instructions they take 80, 120 and 120 minutes; on others
# leave out --bfloat16.
set -euo pipefail
to=${1:?where the runs go, such as /tmp/strong}
ttapca=$(dirname "$0")/../.venv/bin/ttapca
export OMP_WAIT_POLICY=PASSIVE # waiting threads sleep instead of spinning
common=(cifar10 resnet18-cifar-32 --cutout 8 --label-smoothing 0.1 --bfloat16)
again=(--epochs 24 --schedule cosine --warmup 1 --peak 0.1)
"$ttapca" train "${common[@]}" --to "$to/first" --epochs 16 --seed 0
"$ttapca" train "${common[@]}" --to "$to/second" --start "$to/first/weights.safetensors" "${again[@]}" --seed 1
"$ttapca" train "${common[@]}" --to "$to/third" --start "$to/second/weights.safetensors" "${again[@]}" --seed 2
