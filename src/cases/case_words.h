/* SPDX-License-Identifier: Apache-2.0
 * case_words.h: parses the command-line text of a test case, such as "T=100" or "bf16".
 *
 * An op describes a case by a struct of its own, `target` below. Tables that end with {0} list which text sets which
 * member of the struct. Each function returns whether it has recognised the text. Linked into the program, not into the
 * library.
 */
#ifndef COT_CASES_CASE_WORDS_H
#define COT_CASES_CASE_WORDS_H

#include <cotangent/core.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct cot_text_option {
    const char *name;
    size_t offset; /* of the member */
} cot_text_option;

/* For a text NAME=VALUE: returns the member of this name and sets *value to the text after "=". NULL if there is
 * none. */
static inline void *cot_text_option_member(void *target, const cot_text_option *options, const char *text,
                                           const char **value)
{
    const char *equals = strchr(text, '=');
    const size_t length = equals != NULL ? (size_t)(equals - text) : 0;
    for (; equals != NULL && options->name != NULL; options++)
        if (strlen(options->name) == length && strncmp(options->name, text, length) == 0) {
            *value = equals + 1;
            return (char *)target + options->offset;
        }
    return NULL;
}

/* NAME=VALUE for members of type int64_t; values are 0 to INT32_MAX. */
static inline bool cot_parse_size(void *target, const cot_text_option *options, const char *text)
{
    const char *value;
    char *end;
    int64_t *member = cot_text_option_member(target, options, text, &value);
    if (member == NULL)
        return false;
    const long long number = strtoll(value, &end, 10);
    if (end == value || *end != '\0' || number < 0 || number > INT32_MAX)
        return false;
    *member = number;
    return true;
}

/* NAME=VALUE for members of type double. */
static inline bool cot_parse_real(void *target, const cot_text_option *options, const char *text)
{
    const char *value;
    char *end;
    double *member = cot_text_option_member(target, options, text, &value);
    if (member == NULL)
        return false;
    *member = strtod(value, &end);
    return end != value && *end == '\0';
}

/* NAME for members of type bool: sets the member to true. */
static inline bool cot_parse_flag(void *target, const cot_text_option *options, const char *text)
{
    for (; options->name != NULL; options++)
        if (strcmp(options->name, text) == 0)
            return *(bool *)((char *)target + options->offset) = true;
    return false;
}

/* The name of a float dtype. */
static inline bool cot_parse_float_dtype(cot_dtype *dtype, const char *text)
{
    static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(cot_dtype_name(dtypes[i]), text) == 0)
            return *dtype = dtypes[i], true;
    return false;
}

#endif
