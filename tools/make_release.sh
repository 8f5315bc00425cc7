#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds everything of a release from a tag, without the files of the working tree:
#
#   tools/make_release.sh TAG BUILD OUT
#     OUT/cotangent-VERSION-source.tar.gz     the tagged tree (git archive)
#     OUT/cotangent-VERSION-*.whl, cpu/*.whl, cotangent-VERSION.tar.gz     tools/make_wheel.sh
#     OUT/*.deb                               the Debian packages
#     OUT/CHANGES.md                          the version's section of CHANGELOG.md
#     OUT/cotangent-VERSION.cdx.json          the software bill of materials (tools/make_sbom.py)
#     OUT/SHA256SUMS
#
# The tag is vVERSION. The times in all files are that of the tag's commit. The GPU code is that of BUILD if
# its sources are those of the tag, or that of the folder COT_FATBINS of the environment. Otherwise it is compiled.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tag=$1
mkdir -p "$2"
build=$(cd "$2" && pwd)
out=$3
cd "$here/.."

fail()
{
    echo "release: $*" >&2
    exit 1
}

git rev-parse -q --verify "refs/tags/$tag^{commit}" >/dev/null || fail "there is no tag $tag"
number()
{
    git show "$tag:include/cotangent/core.h" | sed -n "s/^#define COT_VERSION_$1 \([0-9]*\).*/\1/p"
}
version=$(number MAJOR).$(number MINOR).$(number PATCH)
[ "$tag" = "v$version" ] || fail "tag $tag, but include/cotangent/core.h has version $version"
changes=$(git show "$tag:CHANGELOG.md" | awk -v head="## [$version]" '
    index($0, "## [") == 1 { found = index($0, head) == 1 } found { print }')
[ -n "$changes" ] || fail "CHANGELOG.md of $tag has no section [$version]"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$tag")
COT_COMMIT=$(git rev-parse --short=10 "$tag^{commit}")
export SOURCE_DATE_EPOCH COT_COMMIT

work=$build/release_tree
[ ! -e "$out" ] || [ -f "$out/SHA256SUMS" ] || fail "$out has no SHA256SUMS, so that it is not a release to replace"
rm -rf "$work"
final=$out
out=$work/out # moved to its place when it is complete
mkdir -p "$out"
source=$work/cotangent-$version-source.tar.gz
git archive --format=tar --prefix="cotangent-$version/" "$tag" | gzip -n -9 >"$source"
tar -C "$work" -xzf "$source"
tree=$work/cotangent-$version

# The GPU code depends on these files and on nvcc.
if [ -n "${COT_FATBINS-}" ]; then
    :
elif [ -f "$build/build.ninja" ] &&
    git diff --quiet "$tag" -- include src examples/train_lm/cuda cmake/cuda.cmake tools/compile_device_code.sh; then
    COT_FATBINS=$build/cuda
    cmake --build "$build" --target device_code
else
    COT_FATBINS=$tree/build/cuda
    cmake --log-level=NOTICE -G Ninja -S "$tree" -B "$tree/build" >/dev/null
    cmake --build "$tree/build" --target device_code
fi
export COT_FATBINS

"$tree/tools/make_wheel.sh" "$tree/build" "$out"
# The packages are made in the build tree of the wheel, which has compiled most of their objects. RPATHs of the build are
# relative, because the linker hashes them into the build id.
packages=$tree/build/wheel
cmake --log-level=NOTICE -S "$tree" -B "$packages" -DCOT_PYTHON=OFF -DCOT_PROGRAM=ON -DCOT_INSTALL=ON -DCOT_PARALLEL=ON \
    -DCOT_CUDA=ON "-DCOT_FATBINS=$COT_FATBINS" -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON >/dev/null
cmake --build "$packages"
(cd "$packages" && cpack -G DEB >/dev/null)
cp "$source" "$packages"/deb/*.deb "$out"
printf '%s\n' "$changes" >"$out/CHANGES.md"
python3 "$tree/tools/make_sbom.py" "$out" "$version" "$(git rev-parse "$tag^{commit}")" >"$work/sbom"
cp "$work/sbom" "$out/cotangent-$version.cdx.json"
(cd "$out" && find . -type f ! -name SHA256SUMS | sed 's:^\./::' | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)
rm -rf "$final"
mkdir -p "$(dirname "$final")"
mv "$out" "$final"
cat "$final/SHA256SUMS"
