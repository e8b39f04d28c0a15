#!/usr/bin/env bash
# The whole way in one command: train with scikit-learn, compile, run the emitted file on the GPU, compare.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash .ci/setup.sh examples)
PATH=$(dirname "$python"):$PATH

step() {
    echo "\$ $*"
    "$@"
}

step python examples/train_digits.py
step meganeura-aot examples/digits_mlp.py -o out/digits_mlp.py
step python examples/run_digits.py
