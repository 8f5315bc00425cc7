/* SPDX-License-Identifier: Apache-2.0
 *
 * tokenizer.c: reads tokenizer.json, and encodes texts. */
#include "tokenizer.h"

#include "array.h"
#include "byte_map.h"
#include "io/json.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_IDS = 1 << 26, CACHED_WORDS = 1 << 20, CACHED_WORD_BYTES = 64 };

typedef struct token {
    char *bytes;
    size_t count;
} token;

/* A token that is found in the text before the text is divided into words. Those that are `normalized` are found last. */
typedef struct added_token {
    char *text;
    size_t bytes;
    int32_t id;
    bool normalized;
} added_token;

/* A pair of neighbours that can be merged, in a heap by rank and position. */
typedef struct candidate {
    uint32_t rank, position;
    int32_t id; /* of the merged token */
} candidate;

/* A token of the word that is encoded, in a linked list. */
typedef struct symbol {
    int32_t id; /* -1: merged into the symbol before */
    int64_t before, after;
} symbol;

struct tokenizer {
    token *tokens; /* [size] */
    int32_t size, byte_ids[256];
    byte_map ids;    /* the bytes of a token of the model: its id */
    byte_map merges; /* two ids: rank << 32 | id of the merged token */
    added_token *added;
    size_t added_count;
    bool begins_added[256]; /* an added token begins with this byte */
    bool ignore_merges;
    word_splitter *splitter;
    byte_map cache; /* a word: the index of its tokens in cached.ids, which begin with their number */
    token_ids cached;
    symbol *symbols; /* of the word that is encoded */
    candidate *heap;
    size_t symbol_capacity, heap_count, heap_capacity;
};

/* ---- lists ------------------------------------------------------------------------------------------------------- */

bool token_ids_add(token_ids *list, int32_t id)
{
    int32_t *ids = array_with_room(list->ids, &list->capacity, list->count + 1, sizeof *ids);
    if (ids == NULL)
        return false;
    list->ids = ids;
    list->ids[list->count++] = id;
    return true;
}

/* ---- tokenizer.json ---------------------------------------------------------------------------------------------- */

typedef struct reader {
    tokenizer *t;
    const char *path;
    io_error *error;
} reader;

static bool no_memory(const reader *r)
{
    return io_no_memory(r->error, r->path, "tokenizer");
}

/* Refuses a field that is neither missing, null, false nor an empty text. */
static bool is_unset(const reader *r, const json_t *object, const char *where, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (value == NULL || json_is_null(value) || json_is_false(value) ||
        (json_is_string(value) && json_string_length(value) == 0))
        return true;
    return io_fail(r->error, r->path, "%s%s is set, which is not supported", where, key);
}

static const char *type_of(const json_t *object)
{
    const char *type = json_string_value(json_object_get(object, "type"));
    return type == NULL ? "" : type;
}

/* Reads an id of the file. */
static bool read_id(const reader *r, const json_t *value, const char *name, int32_t *id)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) >= MAX_IDS)
        return io_fail(r->error, r->path, "the id of \"%s\" is no integer from 0 to %d", name, MAX_IDS - 1);
    *id = (int32_t)json_integer_value(value);
    return true;
}

/* Sets the bytes of token `id`. */
static bool set_token(const reader *r, int32_t id, const char *bytes, size_t count)
{
    tokenizer *t = r->t;
    if (id >= t->size) {
        token *grown = realloc(t->tokens, (size_t)(id + 1) * sizeof *grown);
        if (grown == NULL)
            return no_memory(r);
        memset(grown + t->size, 0, (size_t)(id + 1 - t->size) * sizeof *grown);
        t->tokens = grown;
        t->size = id + 1;
    }
    char *copy = malloc(count + 1);
    if (copy == NULL)
        return no_memory(r);
    memcpy(copy, bytes, count);
    free(t->tokens[id].bytes);
    t->tokens[id] = (token){copy, count};
    return true;
}

/* The largest id first, so that the array of tokens grows once. */
static bool reserve_tokens(const reader *r, json_t *vocabulary)
{
    const char *name;
    json_t *value;
    int32_t id = 0, largest = -1;
    json_object_foreach(vocabulary, name, value)
    {
        if (!read_id(r, value, name, &id))
            return false;
        largest = id > largest ? id : largest;
    }
    return largest < 0 ? io_fail(r->error, r->path, "model.vocab is empty") : set_token(r, largest, "", 0);
}

static bool read_vocabulary(const reader *r, json_t *vocabulary)
{
    tokenizer *t = r->t;
    const char *name;
    json_t *value;
    if (!json_is_object(vocabulary))
        return io_fail(r->error, r->path, "model.vocab is missing or no object");
    if (!reserve_tokens(r, vocabulary))
        return false;
    json_object_foreach(vocabulary, name, value)
    {
        const int32_t id = (int32_t)json_integer_value(value);
        char *bytes = malloc(strlen(name) + 1);
        if (bytes == NULL)
            return no_memory(r);
        const int64_t count = token_bytes(name, bytes);
        bool good;
        if (count < 0) { /* no bytes have this name: only an added token can be so */
            good = set_token(r, id, name, strlen(name));
        } else {
            good = set_token(r, id, bytes, (size_t)count) &&
                   (byte_map_add(&t->ids, bytes, (size_t)count, id) != NULL || no_memory(r));
            if (count == 1)
                t->byte_ids[(unsigned char)bytes[0]] = id;
        }
        free(bytes);
        if (!good)
            return false;
    }
    return true;
}

/* The two names of a merge: ["a", "b"] or "a b". `first` has room for the whole text. */
static bool split_merge(const json_t *merge, char *first, const char **second)
{
    const char *text = json_string_value(merge);
    if (text != NULL) {
        const char *space = strchr(text, ' ');
        if (space == NULL)
            return false;
        memcpy(first, text, (size_t)(space - text));
        first[space - text] = '\0';
        *second = space + 1;
        return true;
    }
    const char *left = json_string_value(json_array_get(merge, 0));
    *second = json_string_value(json_array_get(merge, 1));
    if (left == NULL || *second == NULL || json_array_size(merge) != 2)
        return false;
    strcpy(first, left);
    return true;
}

static size_t merge_length(const json_t *merge)
{
    return json_is_string(merge)
               ? json_string_length(merge)
               : json_string_length(json_array_get(merge, 0)) + json_string_length(json_array_get(merge, 1));
}

static bool read_merge(const reader *r, size_t rank, const json_t *merge)
{
    tokenizer *t = r->t;
    const size_t length = merge_length(merge);
    char *bytes = malloc(2 * length + 2), *first = bytes + length + 1;
    const char *second;
    bool good = false;
    if (bytes == NULL)
        return no_memory(r);
    if (!split_merge(merge, first, &second)) {
        io_fail(r->error, r->path, "model.merges[%zu] is no pair of tokens", rank);
    } else {
        const int64_t left = token_bytes(first, bytes), right = left < 0 ? -1 : token_bytes(second, bytes + left);
        const int64_t *a = right < 0 ? NULL : byte_map_find(&t->ids, bytes, (size_t)left),
                      *b = right < 0 ? NULL : byte_map_find(&t->ids, bytes + left, (size_t)right),
                      *both = right < 0 ? NULL : byte_map_find(&t->ids, bytes, (size_t)(left + right));
        if (a == NULL || b == NULL || both == NULL)
            io_fail(r->error, r->path, "model.merges[%zu]: model.vocab lacks a token of \"%s\" and \"%s\"", rank, first,
                    second);
        else
            good = byte_map_add(&t->merges, (int32_t[]){(int32_t)*a, (int32_t)*b}, 2 * sizeof(int32_t),
                                (int64_t)rank << 32 | *both) != NULL ||
                   no_memory(r);
    }
    free(bytes);
    return good;
}

static bool read_model(const reader *r, const json_t *model)
{
    static const char *const UNSET[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"};
    const json_t *merges = json_object_get(model, "merges");
    if (!json_is_object(model) || (json_object_get(model, "type") != NULL && strcmp(type_of(model), "BPE") != 0))
        return io_fail(r->error, r->path, "model is \"%s\", expected BPE", type_of(model));
    for (size_t i = 0; i < sizeof UNSET / sizeof *UNSET; i++)
        if (!is_unset(r, model, "model.", UNSET[i]))
            return false;
    r->t->ignore_merges = json_is_true(json_object_get(model, "ignore_merges"));
    if (!read_vocabulary(r, json_object_get(model, "vocab")))
        return false;
    if (!json_is_array(merges))
        return io_fail(r->error, r->path, "model.merges is missing or no array");
    for (size_t i = 0; i < json_array_size(merges); i++)
        if (!read_merge(r, i, json_array_get(merges, i)))
            return false;
    return true;
}

/* The longest token first. */
static int compare_added(const void *a, const void *b)
{
    const added_token *x = a, *y = b;
    return (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

static bool read_added_token(const reader *r, const json_t *value)
{
    static const char *const UNSET[] = {"single_word", "lstrip", "rstrip"};
    tokenizer *t = r->t;
    const char *text = json_string_value(json_object_get(value, "content"));
    int32_t id = 0;
    if (text == NULL || text[0] == '\0')
        return io_fail(r->error, r->path, "added_tokens: a token has no content");
    for (size_t i = 0; i < sizeof UNSET / sizeof *UNSET; i++)
        if (!is_unset(r, value, "added_tokens: ", UNSET[i]))
            return false;
    if (!read_id(r, json_object_get(value, "id"), text, &id) || !set_token(r, id, text, strlen(text)))
        return false;
    added_token *grown = realloc(t->added, (t->added_count + 1) * sizeof *grown);
    if (grown != NULL)
        t->added = grown;
    char *copy = grown == NULL ? NULL : strdup(text);
    if (copy == NULL)
        return no_memory(r);
    t->added[t->added_count++] =
        (added_token){copy, strlen(text), id, json_is_true(json_object_get(value, "normalized"))};
    t->begins_added[(unsigned char)text[0]] = true;
    return true;
}

static bool read_added_tokens(const reader *r, const json_t *tokens)
{
    for (size_t i = 0; i < json_array_size(tokens); i++)
        if (!read_added_token(r, json_array_get(tokens, i)))
            return false;
    if (r->t->added_count > 0)
        qsort(r->t->added, r->t->added_count, sizeof *r->t->added, compare_added);
    return true;
}

/* The regular expression of one part of the pre_tokenizer, or NULL. False if the part is not supported. */
static bool read_words_of(const reader *r, const json_t *part, const char **expression)
{
    const json_t *add_space = json_object_get(part, "add_prefix_space"), *use = json_object_get(part, "use_regex");
    *expression = NULL;
    if (strcmp(type_of(part), "ByteLevel") == 0) {
        if (json_is_true(add_space))
            return io_fail(r->error, r->path, "pre_tokenizer.add_prefix_space is set, which is not supported");
        *expression = json_is_false(use) ? NULL : WORDS_OF_GPT2;
        return true;
    }
    const char *behavior = json_string_value(json_object_get(part, "behavior"));
    *expression = json_string_value(json_object_get(json_object_get(part, "pattern"), "Regex"));
    if (strcmp(type_of(part), "Split") == 0 && *expression != NULL && behavior != NULL &&
        strcmp(behavior, "Isolated") == 0 && !json_is_true(json_object_get(part, "invert")))
        return true;
    return io_fail(
        r->error, r->path,
        "pre_tokenizer \"%s\" is not supported, expected ByteLevel, or Split by a Regex with the behavior Isolated",
        type_of(part));
}

static bool read_pre_tokenizer(const reader *r, const json_t *pre)
{
    const bool is_sequence = strcmp(type_of(pre), "Sequence") == 0;
    const json_t *parts = json_object_get(pre, "pretokenizers"), *last = pre;
    const size_t count = is_sequence ? json_array_size(parts) : 1;
    const char *expression = NULL, *found;
    for (size_t i = 0; i < count; i++) {
        last = is_sequence ? json_array_get(parts, i) : pre;
        if (!read_words_of(r, last, &found))
            return false;
        if (found != NULL && expression != NULL)
            return io_fail(r->error, r->path, "pre_tokenizer has two regular expressions, expected one");
        expression = found != NULL ? found : expression;
    }
    if (count == 0 || strcmp(type_of(last), "ByteLevel") != 0)
        return io_fail(r->error, r->path, "pre_tokenizer ends with \"%s\", expected ByteLevel", type_of(last));
    r->t->splitter = word_splitter_create(expression != NULL ? expression : "(?s).+", r->path, r->error);
    return r->t->splitter != NULL;
}

static bool read_file(const reader *r, const json_t *root)
{
    if (!json_is_object(root))
        return io_fail(r->error, r->path, "is no tokenizer.json: expected an object");
    return is_unset(r, root, "", "normalizer") && read_model(r, json_object_get(root, "model")) &&
           read_added_tokens(r, json_object_get(root, "added_tokens")) &&
           read_pre_tokenizer(r, json_object_get(root, "pre_tokenizer"));
}

tokenizer *tokenizer_open(const char *path, io_error *error)
{
    tokenizer *t = calloc(1, sizeof *t);
    io_mapping file;
    if (t == NULL) {
        io_no_memory(error, path, "tokenizer");
        return NULL;
    }
    for (int i = 0; i < 256; i++)
        t->byte_ids[i] = -1;
    if (!io_map(&file, path, error)) {
        free(t);
        return NULL;
    }
    json_t *root = io_read_json((const char *)file.bytes, file.size, path, "the text", error);
    const reader r = {t, path, error};
    const bool good = root != NULL && read_file(&r, root);
    json_decref(root);
    io_unmap(&file);
    if (good)
        return t;
    tokenizer_close(t);
    return NULL;
}

void tokenizer_close(tokenizer *t)
{
    if (t == NULL)
        return;
    for (int32_t i = 0; i < t->size; i++)
        free(t->tokens[i].bytes);
    for (size_t i = 0; i < t->added_count; i++)
        free(t->added[i].text);
    free(t->tokens);
    free(t->added);
    byte_map_free(&t->ids);
    byte_map_free(&t->merges);
    byte_map_free(&t->cache);
    free(t->cached.ids);
    free(t->symbols);
    free(t->heap);
    word_splitter_destroy(t->splitter);
    free(t);
}

int32_t tokenizer_size(const tokenizer *t)
{
    return t->size;
}

int32_t tokenizer_find(const tokenizer *t, const char *text)
{
    for (size_t i = 0; i < t->added_count; i++)
        if (strcmp(t->added[i].text, text) == 0)
            return t->added[i].id;
    const int64_t *id = byte_map_find(&t->ids, text, strlen(text));
    return id == NULL ? -1 : (int32_t)*id;
}

const char *tokenizer_bytes(const tokenizer *t, int32_t id, size_t *bytes)
{
    const bool exists = id >= 0 && id < t->size && t->tokens[id].bytes != NULL;
    *bytes = exists ? t->tokens[id].count : 0;
    return exists ? t->tokens[id].bytes : "";
}

/* ---- merges ------------------------------------------------------------------------------------------------------ */

static bool comes_before(candidate a, candidate b)
{
    return a.rank != b.rank ? a.rank < b.rank : a.position < b.position;
}

static bool push(tokenizer *t, candidate added)
{
    candidate *heap = array_with_room(t->heap, &t->heap_capacity, t->heap_count + 1, sizeof *heap);
    if (heap == NULL)
        return false;
    t->heap = heap;
    size_t i = t->heap_count++;
    for (; i > 0 && comes_before(added, t->heap[(i - 1) / 2]); i = (i - 1) / 2)
        t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = added;
    return true;
}

static candidate pop(tokenizer *t)
{
    const candidate top = t->heap[0], moved = t->heap[--t->heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < t->heap_count; i = child) {
        if (child + 1 < t->heap_count && comes_before(t->heap[child + 1], t->heap[child]))
            child++;
        if (!comes_before(t->heap[child], moved))
            break;
        t->heap[i] = t->heap[child];
    }
    t->heap[i] = moved;
    return top;
}

/* The merge of the symbol at a position with its neighbour, or NULL. */
static const int64_t *merge_at(const tokenizer *t, int64_t position)
{
    const int64_t after = position < 0 ? -1 : t->symbols[position].after;
    if (after < 0)
        return NULL;
    return byte_map_find(&t->merges, (int32_t[]){t->symbols[position].id, t->symbols[after].id}, 2 * sizeof(int32_t));
}

static bool push_merge_at(tokenizer *t, int64_t position)
{
    const int64_t *merge = merge_at(t, position);
    return merge == NULL || push(t, (candidate){(uint32_t)(*merge >> 32), (uint32_t)position, (int32_t)*merge});
}

/* Merges pairs of t->symbols until no pair can be merged. */
static bool merge_symbols(tokenizer *t, size_t count)
{
    t->heap_count = 0;
    for (size_t i = 0; i < count; i++)
        if (!push_merge_at(t, (int64_t)i))
            return false;
    while (t->heap_count > 0) {
        const candidate top = pop(t);
        symbol *s = &t->symbols[top.position];
        const int64_t *merge = s->id < 0 ? NULL : merge_at(t, top.position);
        if (merge == NULL || (int32_t)*merge != top.id) /* another merge came first */
            continue;
        symbol *merged = &t->symbols[s->after];
        s->id = top.id;
        s->after = merged->after;
        merged->id = -1;
        if (s->after >= 0)
            t->symbols[s->after].before = top.position;
        if (!push_merge_at(t, s->before) || !push_merge_at(t, top.position))
            return false;
    }
    return true;
}

/* ---- encoding ----------------------------------------------------------------------------------------------------- */

typedef struct encoding {
    tokenizer *t;
    const char *name;
    token_ids *out;
    io_error *error;
} encoding;

static bool encode_new_word(const encoding *e, const char *word, size_t bytes)
{
    tokenizer *t = e->t;
    const int64_t *whole = t->ignore_merges ? byte_map_find(&t->ids, word, bytes) : NULL;
    if (whole != NULL)
        return token_ids_add(e->out, (int32_t)*whole) || io_no_memory(e->error, e->name, "tokens");
    symbol *symbols = array_with_room(t->symbols, &t->symbol_capacity, bytes, sizeof *symbols);
    if (symbols == NULL)
        return io_no_memory(e->error, e->name, "a word");
    t->symbols = symbols;
    for (size_t i = 0; i < bytes; i++) {
        const int32_t id = t->byte_ids[(unsigned char)word[i]];
        if (id < 0)
            return io_fail(e->error, e->name, "the tokenizer has no token for the byte 0x%02x", (unsigned char)word[i]);
        t->symbols[i] = (symbol){id, (int64_t)i - 1, i + 1 < bytes ? (int64_t)i + 1 : -1};
    }
    bool good = merge_symbols(t, bytes);
    for (int64_t i = 0; good && i >= 0; i = t->symbols[i].after)
        good = token_ids_add(e->out, t->symbols[i].id);
    return good || io_no_memory(e->error, e->name, "tokens");
}

/* Keeps the tokens of a word that have just been appended to e->out. */
static bool keep_word(const encoding *e, const char *word, size_t bytes, size_t first)
{
    tokenizer *t = e->t;
    if (t->cache.count == CACHED_WORDS) {
        byte_map_clear(&t->cache);
        t->cached.count = 0;
    }
    bool good = byte_map_add(&t->cache, word, bytes, (int64_t)t->cached.count) != NULL &&
                token_ids_add(&t->cached, (int32_t)(e->out->count - first));
    for (size_t i = first; good && i < e->out->count; i++)
        good = token_ids_add(&t->cached, e->out->ids[i]);
    return good || io_no_memory(e->error, e->name, "words");
}

static bool encode_word(void *context, const char *word, size_t bytes)
{
    const encoding *e = context;
    tokenizer *t = e->t;
    const size_t first = e->out->count;
    const int64_t *kept = bytes > CACHED_WORD_BYTES ? NULL : byte_map_find(&t->cache, word, bytes);
    if (kept == NULL)
        return encode_new_word(e, word, bytes) && (bytes > CACHED_WORD_BYTES || keep_word(e, word, bytes, first));
    for (int32_t i = 1; i <= t->cached.ids[*kept]; i++)
        if (!token_ids_add(e->out, t->cached.ids[*kept + i]))
            return io_no_memory(e->error, e->name, "tokens");
    return true;
}

/* The longest added token at the beginning of a text, or NULL. */
static const added_token *added_token_at(const tokenizer *t, bool normalized, const char *text, size_t bytes)
{
    if (t->begins_added[(unsigned char)text[0]])
        for (size_t i = 0; i < t->added_count; i++) {
            const added_token *a = &t->added[i];
            if (a->normalized == normalized && a->bytes <= bytes && memcmp(a->text, text, a->bytes) == 0)
                return a;
        }
    return NULL;
}

/* Encodes the text between added tokens: first those that are not normalized, in the text between these the others. */
static bool encode_between(const encoding *e, bool normalized, const char *text, size_t bytes)
{
    size_t done = 0;
    for (size_t i = 0; i <= bytes;) {
        const added_token *a = i < bytes ? added_token_at(e->t, normalized, text + i, bytes - i) : NULL;
        if (a == NULL && i < bytes) {
            i++;
            continue;
        }
        if (i > done && !(normalized ? word_splitter_each(e->t->splitter, e->name, text + done, i - done, encode_word,
                                                          (void *)(uintptr_t)e, e->error)
                                     : encode_between(e, true, text + done, i - done)))
            return false;
        if (a == NULL)
            return true;
        if (!token_ids_add(e->out, a->id))
            return io_no_memory(e->error, e->name, "tokens");
        done = i = i + a->bytes;
    }
    return true;
}

bool tokenizer_encode(tokenizer *t, const char *name, const char *text, size_t bytes, token_ids *out, io_error *error)
{
    const encoding e = {t, name, out, error};
    return encode_between(&e, false, text, bytes);
}
