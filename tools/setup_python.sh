#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates a virtual environment with the packages of tools/requirements.txt, and a folder `alone` inside it with those of
# tools/requirements_alone.txt. Prints nothing if it exists already.
#
#   tools/setup_python.sh FOLDER
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
all=$(sed -e '/^#/d' "$here/requirements.txt" "$here/requirements_alone.txt")
[ "$all" != "$(cat "$folder/requirements.txt" 2>/dev/null)" ] || exit 0
echo "setup: installing $(echo "$all" | tr '\n' ' ')in $folder"
python3 -m venv "$folder"
"$folder/bin/pip" --quiet --disable-pip-version-check install -r "$here/requirements.txt"
rm -rf "$folder/alone"
"$folder/bin/pip" --quiet --disable-pip-version-check install --no-deps --target "$folder/alone" -r "$here/requirements_alone.txt"
echo "$all" >"$folder/requirements.txt" # last, so that the file marks a complete environment
