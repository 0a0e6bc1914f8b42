#!/usr/bin/env bash
# Train the networks that ship with the package: three on the 50,000 CIFAR-10 training images, and two
# on scikit-learn's digits.
#
#   scripts/train_checkpoint.sh DIR     the runs go to DIR/NAME; run it again to go on
#
# They need some three hours on two cores. Then: python scripts/pack_checkpoint.py DIR/NAME NAME
# (with --data digits for the last two).
# Where CIFAR-10 lies is said by TTAPCA_HOME, as for every command.
set -euo pipefail
to=${1:?where the runs go, such as /tmp/checkpoints}
ttapca=$(dirname "$0")/../.venv/bin/ttapca
# Waiting threads sleep instead of spinning: the machine stays usable, and so does this on a busy one.
export OMP_WAIT_POLICY=PASSIVE
"$ttapca" train cifar10 resnet20 --to "$to/cifar10-resnet20" --epochs 25 --seed 0
# A small network with a rotation head after its second stage, for test-time training.
"$ttapca" train cifar10 wrn-10-1 --to "$to/cifar10-wrn10-rotation" --epochs 8 --seed 0 \
    --rotation-head block2
# A transformer, whose only normalisation is LayerNorm.
"$ttapca" train cifar10 cct-2 --to "$to/cifar10-cct2" --epochs 50 --cutout 8 \
    --label-smoothing 0.1 --optimizer adamw --peak 0.002 --weight-decay 0.05 --average 0.999 --seed 0
# What the demo and the tests judge: trained once, so that every machine judges the same network.
digits=(--epochs 30 --batch-size 64 --peak 0.1 --padding 1 --no-flip --seed 0 --normalise none)
"$ttapca" train digits small-cnn --to "$to/digits-small-cnn" "${digits[@]}"
"$ttapca" train digits small-cnn --to "$to/digits-small-cnn-rotation" "${digits[@]}" \
    --rotation-head conv2
