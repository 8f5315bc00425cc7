#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of the Python package against the extension of a build folder.
#
#   tests/python/run.sh BUILD [PYTEST'S OPTIONS...]
set -eu
build=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
tools/setup_python.sh "$build/venv"
cd tests/python
PYTHONPATH=$build/python PYTHONDONTWRITEBYTECODE=1 exec "$build/venv/bin/python" -m pytest -q "$@"
