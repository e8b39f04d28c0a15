#!/usr/bin/env bash
# Every check: bash tests/run.sh [arguments of pytest]     for example: bash tests/run.sh -n 0 tests/test_style.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash .ci/setup.sh dev,examples)

step() {
    echo "== $*"
    "$python" -m "$@"
}

step ruff check .
step black --check --quiet --diff .
step mypy
step pytest -n auto "$@"
