#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks what tools/make_release.sh refuses, and the bill of materials of tools/make_sbom.py.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail()
{
    echo "FAILED: $*" >&2
    exit 1
}

# refuses TEXT TAG: in a repository with the tags v0.1.0 and v9.9.9, whose changelog has no section
refuses()
{
    if "$work/clone/tools/make_release.sh" "$2" "$work/build" "$work/out" >"$work/output" 2>&1; then
        fail "tag $2 is accepted"
    fi
    grep -qF "$1" "$work/output" || fail "expected '$1', found: $(cat "$work/output")"
}
version=$(sed -n 's/^#define COT_VERSION_[A-Z]* \([0-9]*\).*/\1/p' include/cotangent/core.h | paste -sd.)
mkdir -p "$work/clone/include/cotangent"
cp -r tools "$work/clone"
cp include/cotangent/core.h "$work/clone/include/cotangent"
echo '## [Unreleased]' >"$work/clone/CHANGELOG.md"
git="git -C $work/clone -c user.name=test -c user.email=test@localhost"
$git init -q
$git add -A
$git commit -qm Tree
$git tag "v$version"
$git tag v9.9.9
refuses 'there is no tag v9.9.8' v9.9.8
refuses "tag v9.9.9, but include/cotangent/core.h has version $version" v9.9.9
refuses "CHANGELOG.md of v$version has no section [$version]" "v$version"
printf '## [Unreleased]\n\n## [%s] - 2026-01-01\n\nText\n' "$version" >"$work/clone/CHANGELOG.md"
$git commit -qam Changes
$git tag -f "v$version" >/dev/null
mkdir "$work/out"
refuses 'has no SHA256SUMS' "v$version"

mkdir "$work/files" "$work/files/cpu"
echo a >"$work/files/a.whl"
echo b >"$work/files/cpu/b.whl"
for run in 1 2; do
    SOURCE_DATE_EPOCH=1000000000 tools/make_sbom.py "$work/files" 1.2.3 0123abc >"$work/sbom$run"
done
cmp "$work/sbom1" "$work/sbom2" || fail 'two bills of materials differ'
python3 - "$work/sbom1" "$(sha256sum "$work/files/cpu/b.whl" | cut -d' ' -f1)" <<'END'
import json, sys
bill = json.load(open(sys.argv[1]))
assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["timestamp"] == "2001-09-09T01:46:40Z", bill["metadata"]
files = {part["name"]: part["hashes"][0]["content"] for part in bill["metadata"]["component"]["components"]}
assert set(files) == {"a.whl", "cpu/b.whl"} and files["cpu/b.whl"] == sys.argv[2], files
tools = {tool["name"]: tool["version"] for tool in bill["metadata"]["tools"]["components"]}
assert tools["auditwheel"] and tools["gcc"], tools
END
echo 'release: refusals and bill of materials in order'
