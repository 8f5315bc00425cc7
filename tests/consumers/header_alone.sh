#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles one public header by itself, with every warning an error.
#
#   tests/consumers/header_alone.sh COMPILER STANDARD INCLUDE_DIRECTORY HEADER
#   example: tests/consumers/header_alone.sh cc c99 include cotangent/core.h
set -eu
case $2 in
c++*) language=c++ only= ;;
*) language=c only='-Wstrict-prototypes -Wmissing-prototypes' ;;
esac
printf '#include <%s>\n' "$4" |
    "$1" -x $language -std="$2" -Wall -Wextra -Wpedantic -Werror -Wundef $only -I "$3" -fsyntax-only -
