#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes the man pages. Section 1 comes from the program's --help (help2man), one page per command. Section 3 comes from
# the comments of the public headers (doxygen), one page per header and struct, and one link per function. The pages
# contain no other text, so they cannot be out of date.
#
#   tools/make_man.sh PROGRAM DIRECTORY
set -eu
program=$(realpath "$1")
out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
rm -rf "$out/man1" "$out/man3" "$out/doxygen"
mkdir -p "$out/man1" "$out/doxygen"
version=$("$program" --version)

# page NAME "COMMAND LINE" "DESCRIPTION" [SEE_ALSO]
page()
{
    printf '[see also]\n%s\n' "$4" >"$out/include"
    help2man --no-info --section 1 --name "$3" --version-string "$version" --source "$version" --include "$out/include" \
        "$2" | sed -e "1,/^\.SH NAME/s/^\.TH .*/.TH $(echo "$1" | tr a-z A-Z) 1 \"\" \"$version\" \"User Commands\"/" \
        -e "/^\.SH NAME/{n;s/^[^\\\\]* /$1 /;}" >"$out/man1/$1.1"
    rm "$out/include"
}

PATH=$(dirname "$program"):$PATH
export ARGP_HELP_FMT=rmargin=1000 # no line breaks: troff breaks lines
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
rm -f "$out"/man3/_* # of the folder of the headers, named after its path on this machine
# For troff a line that begins with a quote is a request. doxygen does not escape such lines.
sed -i "s/^'\([^\\\\]\)/\\\\\&'\1/" "$out"/man3/*
for page in "$out"/man3/*.h.3; do # core.h(3) is too general a name for the system's manual
    header=$(basename "$page" .h.3)
    mv "$page" "$out/man3/cotangent_$header.h.3"
    for function in $(sed -n 's/^COT_\(PARALLEL_\)*API.*[ *]\(cot_[a-z0-9_]*\)(.*/\2/p' "include/cotangent/$header.h"); do
        echo ".so man3/cotangent_$header.h.3" >"$out/man3/$function.3"
    done
done
