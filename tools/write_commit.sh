#!/bin/sh
# Writes a header with the commit of the build, for bench: write_commit.sh SOURCE_DIR HEADER. "+" marks a tree with
# uncommitted changes. COT_COMMIT of the environment is the commit of a tree without .git: tools/make_release.sh. An
# unchanged header is not written again, so that nothing is rebuilt.
commit=${COT_COMMIT-}
if [ -z "$commit" ] && [ -e "$1/.git" ]; then
    commit=$(git -C "$1" rev-parse --short=10 HEAD 2>/dev/null)
    [ -z "$(git -C "$1" status --porcelain --untracked-files=no 2>/dev/null)" ] || commit="$commit+"
fi
printf '#define COT_COMMIT "%s"\n' "${commit:-unknown}" >"$2.new"
if cmp -s "$2.new" "$2"; then rm "$2.new"; else mv "$2.new" "$2"; fi
