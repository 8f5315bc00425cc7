#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks the direction of includes. A part may include the parts to the left of its arrow:
#
#   include/cotangent <- src/core <- src/simd, src/cuda <- src/hip <- src/ops/OP <- src/ops                   the library
#   src/core, src/ops/ops.def <- src/cases; src/ops/OP, src/cases <- src/ops/OP/check <- src/check <- src/bench <- src/cli
#   src/core, src/cuda <- src/parallel <- src/cli                                                         its own library
#   src/io (may include only include/)                                  <- src/check, src/bench, src/cli
#   examples/X, python (may include only include/ and src/io); tests may include everything
#   examples/X/cuda (may also include src/core and src/cuda) <-> examples/X
#
# An op may not include another op. Prints every line that breaks a rule as FILE:LINE.
#
#   tools/check_includes.sh [ROOT]
set -eu
cd "${1:-$(dirname "$0")/..}"
find include src examples python tests -type f \( -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \
    -o -name '*.def' \) 2>/dev/null | LC_ALL=C sort | awk '
# The part of the tree that a file belongs to: "core", "op causal_conv1d", "example train_lm"...
function part_of(path,    p)
{
    split(path, p, "/")
    if (p[1] == "include")
        return "include"
    if (p[1] == "examples")
        return "example " p[2] (p[3] == "cuda" ? " cuda" : "")
    if (p[1] != "src")
        return p[1]
    if (p[2] == "ops")
        return p[4] == "" ? "ops" : p[4] == "check" ? "opcheck " p[3] : "op " p[3]
    return p[2]
}

# "op causal_conv1d" -> "op"
function kind(part)
{
    return part ~ /^op / ? "op" : part ~ /^opcheck / ? "opcheck" : part
}

# Whether a file of `part` may include a file of `other`.
function allowed(part, other)
{
    if (part == other || part == "tests" || other == "include")
        return 1
    if (part ~ /^example .* cuda$/)
        return other == "core" || other == "cuda" || part == other " cuda"
    if (part ~ /^example / || part == "python")
        return other == "io" || other == part " cuda"
    # Of the ops, an op may include itself alone, and its check itself and the op.
    if (part ~ /^op/ && part != "ops" && other ~ /^op/)
        return part == "opcheck " substr(other, 4)
    return index(" " may_include[kind(part)] " ", " " kind(other) " ") > 0
}

# "a/b/../c" -> "a/c"
function normal(path,    p, n, i, out, depth)
{
    n = split(path, p, "/")
    depth = 0
    for (i = 1; i <= n; i++) {
        if (p[i] == ".." && depth > 0)
            depth--
        else if (p[i] != "." && p[i] != "")
            kept[++depth] = p[i]
    }
    out = kept[1]
    for (i = 2; i <= depth; i++)
        out = out "/" kept[i]
    return out
}

function complain(what)
{
    print file ":" line ": " what ": " $0
    faults++
}

# The file of this tree that an include names, or "" for a system header.
function find_target(name,    i, candidate)
{
    for (i = 1; i <= 4; i++) {
        candidate = normal((i == 1 ? directory : i == 2 ? "src" : i == 3 ? "include" : "tests") "/" name)
        if (candidate in known)
            return candidate
    }
    return ""
}

# Whether the CMakeLists.txt in the folder of the file generates a header of this name.
function generated(name,    list, text, found)
{
    list = directory "/CMakeLists.txt"
    found = 0
    while ((getline text < list) > 0)
        if (index(text, "/" name))
            found = 1
    close(list)
    return found
}

BEGIN {
    may_include["core"] = ""
    may_include["simd"] = may_include["cuda"] = "core"
    may_include["io"] = ""
    may_include["parallel"] = "core cuda"
    may_include["hip"] = "core cuda"
    may_include["op"] = "core simd cuda hip"
    may_include["ops"] = "core op"
    may_include["cases"] = "core ops"
    may_include["opcheck"] = "core simd cases"
    may_include["check"] = "core simd cuda op ops io cases opcheck"
    may_include["bench"] = may_include["check"] " check"
    may_include["cli"] = may_include["bench"] " bench parallel"
}

{ files[++count] = $0; known[$0] = 1 }

END {
    for (i = 1; i <= count; i++) {
        file = files[i]
        part = part_of(file)
        directory = file
        sub(/\/[^\/]*$/, "", directory)
        line = 0
        while ((getline < file) > 0) {
            line++
            if ($0 !~ /^[ \t]*#[ \t]*include/)
                continue
            if (!match($0, /["<][^">]+[">]/)) {
                complain("an include that is a macro cannot be checked")
                continue
            }
            quoted = substr($0, RSTART, 1) == "\""
            target = find_target(substr($0, RSTART + 1, RLENGTH - 2))
            includes++
            if (target == "") {
                if (quoted && !generated(substr($0, RSTART + 1, RLENGTH - 2)))
                    complain("no such file in the tree")
            } else if (!allowed(part, part_of(target))) {
                complain("\"" part "\" may not include \"" part_of(target) "\"")
            }
        }
        close(file)
    }
    if (count == 0) {
        print "check_includes: no files found"
        exit 1
    }
    if (faults > 0) {
        printf "check_includes: %d of %d includes go the wrong way\n", faults, includes
        exit 1
    }
    printf "check_includes: %d includes in %d files run one way\n", includes, count
}'
