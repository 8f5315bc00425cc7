#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates a virtual environment with the packages of tools/requirements.txt. Prints nothing if it exists already.
#
#   tools/setup_python.sh FOLDER
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
[ ! -f "$folder/requirements.txt" ] || ! cmp -s "$here/requirements.txt" "$folder/requirements.txt" || exit 0
echo "setup: installing $(sed -e '/^#/d' "$here/requirements.txt" | tr '\n' ' ')in $folder"
python3 -m venv "$folder"
"$folder/bin/pip" --quiet --disable-pip-version-check install -r "$here/requirements.txt"
cp "$here/requirements.txt" "$folder/requirements.txt" # last, so that the file marks a complete environment
