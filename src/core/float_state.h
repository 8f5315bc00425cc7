/* SPDX-License-Identifier: Apache-2.0
 * float_state.h: the default floating-point state (rounding to nearest, subnormal numbers kept, no traps), in which all
 * arithmetic of the library runs. */
#ifndef COT_CORE_FLOAT_STATE_H
#define COT_CORE_FLOAT_STATE_H

#include <fenv.h>

/* Saves the thread's state in *host and enters the default one. */
static inline void cot_enter_default_float_state(fenv_t *host)
{
    fegetenv(host);
    fesetenv(FE_DFL_ENV);
}

/* Restores rounding, flushing and traps. Exception flags too: a call leaves them as they were. */
static inline void cot_restore_float_state(const fenv_t *host)
{
    fesetenv(host);
}

#endif
