#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of the Python package with the extension of a build folder. If PyTorch cannot be installed (for example
# without a network), the tests are skipped: exit status 77, or 1 with CI=true.
#
#   tests/python/run.sh BUILD [PYTEST'S OPTIONS...]
set -eu
build=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
if ! tools/setup_python.sh "$build/venv"; then
    [ "${CI:-}" != true ] || exit 1
    echo "PyTorch could not be installed in $build/venv (no network?)"
    exit 77
fi
cd tests/python
PYTHONPATH=$build/python PYTHONDONTWRITEBYTECODE=1 exec "$build/venv/bin/python" -m pytest -q "$@"
