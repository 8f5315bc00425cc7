#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes the man pages: section 1 from the program's own --help (help2man), a page a command; section 3 from the
# comments of the public headers (doxygen), a page a header and a struct, and a link for every function. Nothing is
# said twice, so nothing can be out of date.
#
#   tools/make_man.sh PROGRAM DIRECTORY
set -eu
program=$(realpath "$1")
out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
rm -rf "$out/man1" "$out/man3" "$out/doxygen"
mkdir -p "$out/man1" "$out/doxygen"
version=$("$program" --version)

# page NAME "COMMAND LINE" "what it is" [SEE_ALSO]
page()
{
    printf '[see also]\n%s\n' "$4" >"$out/include"
    help2man --no-info --section 1 --name "$3" --version-string "$version" --source "$version" --include "$out/include" \
        "$2" | sed -e "1,/^\.SH NAME/s/^\.TH .*/.TH $(echo "$1" | tr a-z A-Z) 1 \"\" \"$version\" \"User Commands\"/" \
        -e "/^\.SH NAME/{n;s/^[^\\\\]* /$1 /;}" >"$out/man1/$1.1"
    rm "$out/include"
}

PATH=$(dirname "$program"):$PATH
export ARGP_HELP_FMT=rmargin=1000 # whole lines: troff breaks them itself
commands=$(cotangent --help | sed -n 's/^  \([a-z][a-z]*\)  *[^ ].*/\1/p')
see=
for command in $commands; do
    what=$(cotangent --help | sed -n "s/^  $command  *//p")
    page "cotangent-$command" "cotangent $command" "$what" '\fBcotangent\fR(1)'
    see="$see${see:+, }\\fBcotangent-$command\\fR(1)"
done
page cotangent cotangent 'the kernels that train sequence models, forward and backward' "$see"

tools/make_docs.sh --lenient "$out/doxygen" >&2
mv "$out/doxygen/man/man3" "$out/man3"
rm -r "$out/doxygen"
# doxygen forgets that to troff a line which begins with a quote is a request.
sed -i "s/^'\([^\\\\]\)/\\\\\&'\1/" "$out"/man3/*
for page in "$out"/man3/*.h.3; do # core.h(3) is too short a name for everybody's manual
    header=$(basename "$page" .h.3)
    [ "$header" = cotangent ] || mv "$page" "$out/man3/cotangent_$header.h.3"
    for function in $(sed -n 's/^COT_API.*[ *]\(cot_[a-z0-9_]*\)(.*/\1/p' "include/cotangent/$header.h"); do
        echo ".so man3/cotangent_$header.h.3" >"$out/man3/$function.3"
    done
done
