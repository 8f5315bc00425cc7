# SPDX-License-Identifier: Apache-2.0
# Completion of `cotangent` in bash. The words come from the program itself: --help lists the commands and their options,
# and `cotangent ops` lists the ops and their directions.
_cotangent()
{
    local program=${COMP_WORDS[0]} word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local command=${COMP_WORDS[1]} words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="--help --version $("$program" --help 2>/dev/null | sed -n 's/^  \([a-z][a-z]*\)  *[^ ].*/\1/p')"
    elif [[ $word == -* ]]; then
        words=$("$program" "$command" --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]*')
    elif [ "$command" = demo ]; then
        words=$("$program" demo --help 2>/dev/null | sed -n 's/^\([0-9][0-9]*\):.*/\1/p')
    elif [ "$previous" = "$command" ]; then
        words=$("$program" ops 2>/dev/null | grep -oE '^[a-z][a-z0-9_]*')
    elif [ "$COMP_CWORD" -eq 3 ]; then
        words=$("$program" ops 2>/dev/null | awk -v op="$previous" '/^[a-z]/ { found = $1 == op } found && /^  [a-z]/ { print $1 }')
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _cotangent cotangent
