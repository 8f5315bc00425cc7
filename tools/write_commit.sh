#!/bin/sh
# Writes a header with the commit of the build, for bench: write_commit.sh SOURCE_DIR HEADER. "+" marks a tree with
# uncommitted changes. An unchanged header is not written again, so that nothing is rebuilt.
commit=$(git -C "$1" rev-parse --short=10 HEAD 2>/dev/null) || commit=unknown
[ -z "$(git -C "$1" status --porcelain --untracked-files=no 2>/dev/null)" ] || commit="$commit+"
printf '#define COT_COMMIT "%s"\n' "$commit" >"$2.new"
if cmp -s "$2.new" "$2"; then rm "$2.new"; else mv "$2.new" "$2"; fi
