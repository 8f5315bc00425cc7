/* SPDX-License-Identifier: Apache-2.0
 * words.h: how the command line's words describe a case: an op lists what words set which member of its plan, a struct of its
 * own, in tables that end with {0}. Each function returns whether the word was one of its. Linked into the program, not into
 * the library. */
#ifndef COT_CORE_WORDS_H
#define COT_CORE_WORDS_H

#include <cotangent/core.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct cot_word {
    const char *name;
    size_t offset; /* of the member */
} cot_word;

/* The member of which `word` is NAME=VALUE, or NULL. */
static inline void *cot_word_member(void *plan, const cot_word *words, const char *word, const char **value)
{
    const char *equals = strchr(word, '=');
    const size_t length = equals != NULL ? (size_t)(equals - word) : 0;
    for (; equals != NULL && words->name != NULL; words++)
        if (strlen(words->name) == length && strncmp(words->name, word, length) == 0) {
            *value = equals + 1;
            return (char *)plan + words->offset;
        }
    return NULL;
}

/* Members of type int64_t, values from 0 to INT32_MAX. */
static inline bool cot_word_size(void *plan, const cot_word *words, const char *word)
{
    const char *value;
    char *end;
    int64_t *member = cot_word_member(plan, words, word, &value);
    if (member == NULL)
        return false;
    const long long number = strtoll(value, &end, 10);
    if (end == value || *end != '\0' || number < 0 || number > INT32_MAX)
        return false;
    *member = number;
    return true;
}

/* Members of type double. */
static inline bool cot_word_real(void *plan, const cot_word *words, const char *word)
{
    const char *value;
    char *end;
    double *member = cot_word_member(plan, words, word, &value);
    if (member == NULL)
        return false;
    *member = strtod(value, &end);
    return end != value && *end == '\0';
}

/* Members of type bool, which the word alone sets. */
static inline bool cot_word_switch(void *plan, const cot_word *words, const char *word)
{
    for (; words->name != NULL; words++)
        if (strcmp(words->name, word) == 0)
            return *(bool *)((char *)plan + words->offset) = true;
    return false;
}

static inline bool cot_word_float_dtype(cot_dtype *dtype, const char *word)
{
    static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(cot_dtype_name(dtypes[i]), word) == 0)
            return *dtype = dtypes[i], true;
    return false;
}

#endif
