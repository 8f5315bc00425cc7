#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Removes the files that `make install` has installed, by the list that it wrote. Also removes directories named
# cotangent that are empty then.
#
#   tools/uninstall.sh MANIFEST [DESTDIR]
set -eu
manifest=$1
destdir=${2-}
[ -f "$manifest" ] || { echo "uninstall: there is no $manifest: nothing was installed from here" >&2; exit 1; }
{ cat "$manifest"; echo; } | while read -r file; do
    [ -n "$file" ] || continue
    rm -f "$destdir$file"
    directory=$(dirname "$destdir$file")
    [ "$(basename "$directory")" != cotangent ] || rmdir "$directory" 2>/dev/null || true
done
echo "uninstall: removed $(grep -c . "$manifest") files"
