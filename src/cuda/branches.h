/* SPDX-License-Identifier: Apache-2.0
 * branches.h: names the branch of NVIDIA's driver that came with a version of CUDA. Needs no cuda.h: the program's
 * doctor uses it in every build. */
#ifndef COT_CUDA_BRANCHES_H
#define COT_CUDA_BRANCHES_H

#include <stddef.h>

/* Returns for example " (R580)", or "" if the version, 1000 * major + 10 * minor, is not listed. */
static inline const char *cot_cuda_branch(int version)
{
    static const struct {
        int version;
        const char *branch;
    } branches[] = {{11080, " (R520)"}, {12000, " (R525)"}, {12010, " (R530)"}, {12020, " (R535)"},
                    {12030, " (R545)"}, {12040, " (R550)"}, {12050, " (R555)"}, {12060, " (R560)"},
                    {12080, " (R570)"}, {12090, " (R575)"}, {13000, " (R580)"}};
    for (size_t i = 0; i < sizeof branches / sizeof *branches; i++)
        if (branches[i].version == version)
            return branches[i].branch;
    return "";
}

#endif
