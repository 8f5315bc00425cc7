#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Loads the extension of a wheel (tools/make_wheel.sh) with every installed Python from 3.9 on, without torch.
# tools/measure_install.py installs it beside torch. Run it before a release.
#
#   tests/python/wheel.sh WHEEL
set -eu
wheel=$1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m zipfile -e "$wheel" "$work"
served=0
for python in python3 python3.9 python3.10 python3.11 python3.12 python3.13 python3.14 "$HOME"/.pyenv/versions/*/bin/python; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || continue
    PYTHONPATH=$work "$python" - "$work" <<'EOF'
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("cotangent._C", sys.argv[1] + "/cotangent/_C.abi3.so")
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
assert "attention_backward" in extension.calls() and extension.dropout_scale(0.5) == 2
try:
    extension.plan("dropout_forward", ("y2",))
except ValueError as error:
    assert "dropout_forward has no argument 'y2'" in str(error)
print(f"wheel: Python {sys.version.split()[0]} loads it, version {extension.version}")
EOF
    served=$((served + 1))
done
echo "wheel: $(du -k "$wheel" | cut -f1) KiB, $served Pythons"
[ "$served" -gt 0 ]
