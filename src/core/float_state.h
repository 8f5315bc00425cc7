/* SPDX-License-Identifier: Apache-2.0
 * float_state.h: the default floating-point state: rounding to nearest, subnormal numbers kept, no traps. All
 * arithmetic of the library runs in it. */
#ifndef COT_CORE_FLOAT_STATE_H
#define COT_CORE_FLOAT_STATE_H

#include <fenv.h>

/* Saves the thread's state in *host and sets the default state. */
static inline void cot_enter_default_float_state(fenv_t *host)
{
    fegetenv(host);
    fesetenv(FE_DFL_ENV);
}

/* Restores the rounding mode, the flush modes, the traps and the exception flags: a call changes none of them. */
static inline void cot_restore_float_state(const fenv_t *host)
{
    fesetenv(host);
}

#endif
