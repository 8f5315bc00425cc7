/* SPDX-License-Identifier: Apache-2.0
 *
 * words.c: UTF-8, and the division of texts into words, with PCRE2. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* ---- UTF-8 ------------------------------------------------------------------------------------------------------ */

/* The bytes of the character at the beginning of a text. *valid: whether it is one. Otherwise the bytes are the longest
 * beginning of a character, at least one byte. */
static size_t character_bytes(const unsigned char *text, size_t bytes, bool *valid)
{
    const unsigned lead = text[0];
    const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    *valid = false;
    if (length == 0)
        return 1;
    for (size_t i = 1; i < length; i++) {
        /* of the second byte: no overlong forms, no surrogates, nothing above U+10FFFF */
        const unsigned least = i == 1 && lead == 0xe0   ? 0xa0
                               : i == 1 && lead == 0xf0 ? 0x90
                                                        : 0x80,
                       most = i == 1 && lead == 0xed   ? 0x9f
                              : i == 1 && lead == 0xf4 ? 0x8f
                                                       : 0xbf;
        if (i == bytes || text[i] < least || text[i] > most)
            return i;
    }
    *valid = true;
    return length;
}

bool utf8_repair(const char *text, size_t bytes, const char **repaired, size_t *repaired_bytes)
{
    static const char REPLACEMENT[] = "\xef\xbf\xbd";
    const unsigned char *from = (const unsigned char *)text;
    size_t wrong = 0, to = 0, length;
    bool valid;
    for (size_t i = 0; i < bytes; i += length) {
        length = character_bytes(from + i, bytes - i, &valid);
        wrong += !valid;
    }
    *repaired = text;
    *repaired_bytes = bytes;
    if (wrong == 0)
        return true;
    char *out = malloc(bytes + 3 * wrong);
    if (out == NULL)
        return false;
    for (size_t i = 0; i < bytes; i += length) {
        length = character_bytes(from + i, bytes - i, &valid);
        const size_t written = valid ? length : 3;
        memcpy(out + to, valid ? text + i : REPLACEMENT, written);
        to += written;
    }
    *repaired = out;
    *repaired_bytes = to;
    return true;
}

/* ---- words ------------------------------------------------------------------------------------------------------ */

/* White space as Unicode defines it, as in Python's package. \s of PCRE2 also has U+180E. */
#define SPACE \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

const char WORDS_OF_GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* An expression with SPACE in place of \s and \S. The caller frees it. NULL if there is no memory. */
static char *with_unicode_space(const char *expression)
{
    char *out = malloc(strlen(expression) / 2 * sizeof "[^" SPACE "]" + 2), *to = out;
    bool in_class = false;
    if (out == NULL)
        return NULL;
    for (const char *from = expression; *from != '\0';) {
        if (from[0] == '\\' && from[1] == 's') {
            to = stpcpy(to, in_class ? SPACE : "[" SPACE "]");
            from += 2;
        } else if (from[0] == '\\' && from[1] == 'S' && !in_class) {
            to = stpcpy(to, "[^" SPACE "]");
            from += 2;
        } else {
            if (from[0] == '\\' && from[1] != '\0')
                *to++ = *from++;
            else if (from[0] == '[' || from[0] == ']')
                in_class = from[0] == '[';
            *to++ = *from++;
        }
    }
    *to = '\0';
    return out;
}

struct word_splitter {
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

enum { STACK_START = 64 << 10, STACK_MOST = 256 << 20 };

word_splitter *word_splitter_create(const char *expression, const char *path, io_error *error)
{
    word_splitter *s = calloc(1, sizeof *s);
    char *translated = with_unicode_space(expression);
    int code;
    PCRE2_SIZE at; /* in the translated expression */
    if (s == NULL || translated == NULL) {
        io_no_memory(error, path, "regular expression");
        free(translated);
        free(s);
        return NULL;
    }
    s->code = pcre2_compile((PCRE2_SPTR)translated, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    free(translated);
    if (s->code == NULL) {
        PCRE2_UCHAR reason[256];
        pcre2_get_error_message(code, reason, sizeof reason);
        if (code == PCRE2_ERROR_HEAP_FAILED)
            io_no_memory(error, path, "regular expression");
        else
            io_fail(error, path, "pre_tokenizer: the regular expression is not valid: %s", (char *)reason);
        word_splitter_destroy(s);
        return NULL;
    }
    s->match = pcre2_match_data_create_from_pattern(s->code, NULL);
    s->context = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(STACK_START, STACK_MOST, NULL);
    if (s->match == NULL || s->context == NULL || s->stack == NULL) {
        io_no_memory(error, path, "regular expression");
        word_splitter_destroy(s);
        return NULL;
    }
    pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE); /* without it, matching is slower */
    pcre2_jit_stack_assign(s->context, NULL, s->stack);
    return s;
}

void word_splitter_destroy(word_splitter *s)
{
    if (s == NULL)
        return;
    pcre2_jit_stack_free(s->stack);
    pcre2_match_context_free(s->context);
    pcre2_match_data_free(s->match);
    pcre2_code_free(s->code);
    free(s);
}

bool word_splitter_each(word_splitter *s, const char *name, const char *text, size_t bytes,
                        bool (*visit)(void *context, const char *word, size_t bytes), void *context, io_error *error)
{
    for (size_t done = 0, from = 0; done < bytes;) {
        const int found =
            from < bytes ? pcre2_match(s->code, (PCRE2_SPTR)text, bytes, from, PCRE2_NO_UTF_CHECK, s->match, s->context)
                         : PCRE2_ERROR_NOMATCH;
        if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
            PCRE2_UCHAR reason[256];
            pcre2_get_error_message(found, reason, sizeof reason);
            return io_fail(error, name, "dividing the text into words failed at byte %zu: %s", from, (char *)reason);
        }
        const PCRE2_SIZE *match = pcre2_get_ovector_pointer(s->match);
        const size_t begin = found < 0 ? bytes : match[0], end = found < 0 ? bytes : match[1];
        if (begin > done && end > begin && !visit(context, text + done, begin - done))
            return false;
        if (end > begin && !visit(context, text + begin, end - begin))
            return false;
        if (found < 0 && !visit(context, text + done, bytes - done))
            return false;
        if (end > begin)
            done = from = end;
        else if (found < 0)
            done = bytes;
        else /* an empty match: the next one begins behind the next character */
            for (from = end + 1; from < bytes && ((unsigned char)text[from] & 0xc0) == 0x80;)
                from++;
    }
    return true;
}

/* ---- names of tokens in tokenizer.json ---------------------------------------------------------------------------- */

/* The bytes that do not stand for themselves are 0 to 0x20, 0x7f to 0xa0, and 0xad. Number i of these 68 is U+0100 + i. */
enum { FIRST_BYTES = 0x21, MIDDLE = 0x7f, MIDDLE_BYTES = 0x22, LAST = 0xad, BYTES = FIRST_BYTES + MIDDLE_BYTES + 1 };

static unsigned character_of(unsigned byte)
{
    if (byte < FIRST_BYTES)
        return 0x100 + byte;
    if (byte >= MIDDLE && byte < MIDDLE + MIDDLE_BYTES)
        return 0x100 + FIRST_BYTES + byte - MIDDLE;
    return byte == LAST ? 0x100 + BYTES - 1 : byte;
}

/* The byte of a character, or -1. */
static int byte_of(unsigned character)
{
    const unsigned i = character - 0x100;
    if (character < 0x100)
        return character_of(character) == character ? (int)character : -1;
    return i < FIRST_BYTES                  ? (int)i
           : i < FIRST_BYTES + MIDDLE_BYTES ? (int)(i - FIRST_BYTES + MIDDLE)
           : i < BYTES                      ? LAST
                                            : -1;
}

void token_name(const char *bytes, size_t count, char *name)
{
    for (size_t i = 0; i < count; i++) {
        const unsigned c = character_of((unsigned char)bytes[i]); /* below U+0800: at most two bytes of UTF-8 */
        if (c >= 0x80)
            *name++ = (char)(0xc0 | c >> 6);
        *name++ = (char)(c < 0x80 ? c : 0x80 | (c & 0x3f));
    }
    *name = '\0';
}

int64_t token_bytes(const char *name, char *out)
{
    const unsigned char *from = (const unsigned char *)name;
    int64_t count = 0;
    while (*from != 0) {
        const bool is_ascii = *from < 0x80, is_pair = (*from & 0xe0) == 0xc0;
        const int byte = is_ascii ? byte_of(*from) : is_pair ? byte_of((*from & 0x1fu) << 6 | (from[1] & 0x3fu)) : -1;
        if (byte < 0)
            return -1;
        from += is_ascii ? 1 : 2;
        out[count++] = (char)byte;
    }
    return count;
}
