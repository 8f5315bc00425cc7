/* SPDX-License-Identifier: Apache-2.0
 * branches.h: which drivers load the code of a version of CUDA. Needs no cuda.h: the program's doctor uses it in every
 * build. A version is 1000 * major + 10 * minor. */
#ifndef COT_CUDA_BRANCHES_H
#define COT_CUDA_BRANCHES_H

#include <stddef.h>

/* Returns the oldest driver for this build's machine code. A driver loads machine code of its own major version of CUDA
 * and of older ones. CUDA 12.0 has the newest functions in use, cuLibraryLoadData and cuLaunchKernelEx. */
static inline int cot_cuda_oldest_driver(int cuda_version)
{
    const int first = cuda_version / 1000 * 1000;
    return first > 12000 ? first : 12000;
}

/* Returns the branch of NVIDIA's driver that came with a version of CUDA, for example " (R580)", or "" if it is not
 * listed. */
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
