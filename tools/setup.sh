#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the packages of tools/packages.txt that this machine lacks. Prints nothing if it lacks none.
# Uses apt-get, as root or through sudo. On other systems it prints the list of packages and exits with status 0.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
wanted=$(sed -e 's/#.*//' "$here/packages.txt")

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "setup: this is no Debian; the build needs what Debian calls:" $wanted >&2
    exit 0
fi

# dpkg-query fails if it does not know one of the names. So the check reads the list of installed packages.
installed=$(dpkg-query -W -f='${Package} ${db:Status-Abbrev}\n' $wanted 2>/dev/null | sed -n 's/ ii *$//p' || true)
missing=
for package in $wanted; do
    if ! printf '%s\n' "$installed" | grep -qxF "$package"; then
        missing="$missing $package"
    fi
done
[ -n "$missing" ] || exit 0

echo "setup: installing$missing"
if [ "$(id -u)" -eq 0 ]; then
    as_root=
elif command -v sudo >/dev/null; then
    as_root=sudo
else
    echo "setup: neither root nor sudo: please install$missing" >&2
    exit 1
fi
$as_root apt-get -qq update
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $missing >/dev/null
