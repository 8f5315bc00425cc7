#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes the reference of the public headers as HTML and man pages, with doxygen. A public declaration without a comment
# is an error, and so is an exported function that is missing in the output. --lenient allows declarations without
# comments, because an install must not fail for that.
#
#   tools/make_docs.sh [--lenient] DIRECTORY
set -eu
settings=
if [ "$1" = --lenient ]; then
    settings='EXTRACT_ALL=YES WARN_AS_ERROR=NO WARNINGS=NO'
    shift
fi
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
rm -rf "$out"
mkdir -p "$out"
(cat docs/api/Doxyfile && printf '%s\n' $settings "OUTPUT_DIRECTORY=$out") | doxygen -
missing=0
for function in $(tools/check_exports.sh --list); do
    if ! grep -qF "\\fB$function\\fP (" "$out"/man/man3/*.h.3; then
        echo "make_docs: $function is exported but not documented"
        missing=1
    fi
done
[ "$missing" -eq 0 ]
echo "make_docs: $out/html/index.html"
