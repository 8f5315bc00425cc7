/* SPDX-License-Identifier: Apache-2.0 */
#include "tokenizer_train.h"

#include "array.h"
#include "io/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- counting words ------------------------------------------------------------------------------------------------ */

typedef struct counting {
    byte_map *counts;
    const char *name;
    io_error *error;
} counting;

static bool count_word(void *context, const char *word, size_t bytes)
{
    const counting *c = context;
    int64_t *count = byte_map_add(c->counts, word, bytes, 0);
    if (count == NULL)
        return io_no_memory(c->error, c->name, "words");
    ++*count;
    return true;
}

bool count_words(byte_map *counts, word_splitter *splitter, const char *name, const char *text, size_t bytes,
                 io_error *error)
{
    counting c = {counts, name, error};
    for (size_t i = 0, line; i < bytes; i += line) {
        const char *end = memchr(text + i, '\n', bytes - i);
        line = end == NULL ? bytes - i : (size_t)(end + 1 - (text + i));
        if (!word_splitter_each(splitter, name, text + i, line, count_word, &c, error))
            return false;
    }
    return true;
}

/* ---- training ------------------------------------------------------------------------------------------------------ */

typedef struct id_pair {
    int32_t left, right;
} id_pair;

typedef struct pair_state {
    id_pair pair;
    int64_t count;
    token_ids fresh; /* the words in which the pair is new since its last entry in the queue, each once */
} pair_state;

/* An entry of the queue: a pair, its count when it was entered, and words in which it occurs. */
typedef struct entry {
    int64_t count;
    int32_t pair; /* index of its pair_state */
    token_ids words;
} entry;

typedef struct trained_word {
    int64_t count;
    int32_t *ids;
    int32_t length;
} trained_word;

typedef struct trained_token {
    char *bytes;
    size_t count;
} trained_token;

typedef struct trainer {
    trained_word *words;
    int32_t word_count;
    trained_token *tokens;
    int32_t token_count, size;
    byte_map ids;     /* bytes of a token: its id */
    byte_map indices; /* id_pair: its index in `pairs` */
    pair_state *pairs;
    size_t pair_count, pair_capacity;
    token_ids changed; /* indices of pairs whose list `fresh` is not empty */
    entry *queue;      /* a heap: the largest count first, then the smallest pair */
    size_t queue_count, queue_capacity;
    byte_map merges; /* id_pair: the number of its last merge */
    id_pair *merge_order;
    size_t merge_count, merge_capacity;
} trainer;

static bool add_token(trainer *t, const char *bytes, size_t count, int32_t *id)
{
    int64_t *found = byte_map_add(&t->ids, bytes, count, t->token_count);
    if (found == NULL)
        return false;
    *id = (int32_t)*found;
    if (*id < t->token_count)
        return true;
    char *copy = malloc(count + 1);
    if (copy == NULL)
        return false;
    memcpy(copy, bytes, count);
    t->tokens[t->token_count++] = (trained_token){copy, count};
    return true;
}

/* A token that is not found by its bytes, unless its name in tokenizer.json stands for bytes. */
static bool add_end(trainer *t, const char *end)
{
    int32_t id;
    char *bytes = malloc(strlen(end) + 1);
    const int64_t count = bytes == NULL ? -1 : token_bytes(end, bytes);
    bool good = bytes != NULL;
    if (count > 0)
        good = add_token(t, bytes, (size_t)count, &id);
    else if (good)
        t->tokens[t->token_count++] = (trained_token){NULL, 0};
    free(bytes);
    return good;
}

/* The bytes, in the order of their characters in tokenizer.json. */
static bool add_bytes(trainer *t)
{
    for (int pass = 0; pass < 2; pass++) /* those that stand for themselves come first */
        for (int byte = 0; byte < 256; byte++) {
            char name[3], bytes = (char)byte;
            int32_t id;
            token_name(&bytes, 1, name);
            const bool is_itself = (unsigned char)name[0] < 0xc4; /* the first byte of U+0100 */
            if (is_itself == (pass == 0) && !add_token(t, &bytes, 1, &id))
                return false;
        }
    return true;
}

static bool add_word(void *context, const char *word, size_t bytes, int64_t count)
{
    trainer *t = context;
    int32_t *ids = malloc(bytes * sizeof *ids);
    if (ids == NULL || bytes > INT32_MAX)
        return free(ids), false;
    for (size_t i = 0; i < bytes; i++)
        ids[i] = (int32_t)*byte_map_find(&t->ids, word + i, 1);
    t->words[t->word_count++] = (trained_word){count, ids, (int32_t)bytes};
    return true;
}

/* Adds `count` to the count of a pair. With `word` >= 0, the pair is new in this word. */
static bool count_pair(trainer *t, int32_t left, int32_t right, int64_t count, int32_t word)
{
    const id_pair pair = {left, right};
    int64_t *index = byte_map_add(&t->indices, &pair, sizeof pair, (int64_t)t->pair_count);
    if (index == NULL)
        return false;
    if ((size_t)*index == t->pair_count) {
        pair_state *pairs = array_with_room(t->pairs, &t->pair_capacity, t->pair_count + 1, sizeof *pairs);
        if (pairs == NULL || t->pair_count == INT32_MAX)
            return false;
        t->pairs = pairs;
        t->pairs[t->pair_count++] = (pair_state){.pair = pair};
    }
    pair_state *state = &t->pairs[*index];
    token_ids *fresh = &state->fresh;
    state->count += count;
    if (word < 0 || (fresh->count > 0 && fresh->ids[fresh->count - 1] == word))
        return true;
    if (fresh->count == 0 && !token_ids_add(&t->changed, (int32_t)*index))
        return false;
    return token_ids_add(fresh, word);
}

static bool comes_before(const trainer *t, const entry *a, const entry *b)
{
    const id_pair x = t->pairs[a->pair].pair, y = t->pairs[b->pair].pair;
    if (a->count != b->count)
        return a->count > b->count;
    return x.left != y.left ? x.left < y.left : x.right < y.right;
}

static bool enqueue(trainer *t, entry added)
{
    entry *queue = array_with_room(t->queue, &t->queue_capacity, t->queue_count + 1, sizeof *queue);
    if (queue == NULL)
        return false;
    t->queue = queue;
    size_t i = t->queue_count++;
    for (; i > 0 && comes_before(t, &added, &t->queue[(i - 1) / 2]); i = (i - 1) / 2)
        t->queue[i] = t->queue[(i - 1) / 2];
    t->queue[i] = added;
    return true;
}

static entry dequeue(trainer *t)
{
    const entry top = t->queue[0], moved = t->queue[--t->queue_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < t->queue_count; i = child) {
        if (child + 1 < t->queue_count && comes_before(t, &t->queue[child + 1], &t->queue[child]))
            child++;
        if (!comes_before(t, &t->queue[child], &moved))
            break;
        t->queue[i] = t->queue[child];
    }
    t->queue[i] = moved;
    return top;
}

/* Enters the pairs that are new in words. */
static bool enqueue_changed(trainer *t)
{
    bool good = true;
    for (size_t i = 0; i < t->changed.count; i++) {
        const int32_t index = t->changed.ids[i];
        pair_state *state = &t->pairs[index];
        good = good && (state->count <= 0 || enqueue(t, (entry){state->count, index, state->fresh}));
        if (!good || state->count <= 0)
            free(state->fresh.ids);
        state->fresh = (token_ids){0};
    }
    t->changed.count = 0;
    return good;
}

/* Replaces a pair by one token in a word, and counts the pairs that disappear and appear. */
static bool merge_in_word(trainer *t, int32_t number, id_pair pair, int32_t id)
{
    trained_word *w = &t->words[number];
    bool good = true;
    int32_t to = 0;
    for (int32_t i = 0; i < w->length; i++, to++) {
        if (i + 1 == w->length || w->ids[i] != pair.left || w->ids[i + 1] != pair.right) {
            w->ids[to] = w->ids[i];
            continue;
        }
        if (to > 0)
            good = good && count_pair(t, w->ids[to - 1], pair.left, -w->count, -1) &&
                   count_pair(t, w->ids[to - 1], id, w->count, number);
        if (i + 2 < w->length)
            good = good && count_pair(t, pair.right, w->ids[i + 2], -w->count, -1) &&
                   count_pair(t, id, w->ids[i + 2], w->count, number);
        w->ids[to] = id;
        i++;
    }
    w->length = to;
    return good;
}

static bool add_merge(trainer *t, id_pair pair, int32_t *id)
{
    const trained_token *left = &t->tokens[pair.left], *right = &t->tokens[pair.right];
    const size_t count = left->count + right->count;
    id_pair *order = array_with_room(t->merge_order, &t->merge_capacity, t->merge_count + 1, sizeof *order);
    char *bytes = malloc(count);
    int64_t *last = NULL;
    if (order != NULL) {
        t->merge_order = order;
        last = byte_map_add(&t->merges, &pair, sizeof pair, 0);
    }
    bool good = bytes != NULL && last != NULL;
    if (good) {
        memcpy(bytes, left->bytes, left->count);
        memcpy(bytes + left->count, right->bytes, right->count);
        *last = (int64_t)t->merge_count;
        t->merge_order[t->merge_count++] = pair;
        good = add_token(t, bytes, count, id);
    }
    free(bytes);
    return good;
}

static bool merge_pairs(trainer *t)
{
    bool good = enqueue_changed(t);
    while (good && t->token_count < t->size && t->queue_count > 0) {
        entry top = dequeue(t);
        const pair_state state = t->pairs[top.pair];
        int32_t id;
        if (top.count != state.count) { /* other merges have changed the count */
            top.count = state.count;
            if (state.count > 0 && (good = enqueue(t, top)))
                continue;
            free(top.words.ids);
            continue;
        }
        good = add_merge(t, state.pair, &id);
        for (size_t i = 0; good && i < top.words.count; i++)
            good = merge_in_word(t, top.words.ids[i], state.pair, id);
        free(top.words.ids);
        good = good && enqueue_changed(t);
    }
    return good;
}

static bool train(trainer *t, const byte_map *counts, const char *end)
{
    t->words = malloc((counts->count + 1) * sizeof *t->words);
    t->tokens = malloc((size_t)(t->size + 512) * sizeof *t->tokens);
    if (t->words == NULL || t->tokens == NULL || counts->count > INT32_MAX || !add_end(t, end) || !add_bytes(t) ||
        !byte_map_each(counts, add_word, t))
        return false;
    for (int32_t i = 0; i < t->word_count; i++) {
        const trained_word w = t->words[i];
        for (int32_t j = 0; j + 1 < w.length; j++)
            if (!count_pair(t, w.ids[j], w.ids[j + 1], w.count, i))
                return false;
    }
    return merge_pairs(t);
}

static void trainer_free(trainer *t)
{
    for (int32_t i = 0; i < t->word_count; i++)
        free(t->words[i].ids);
    for (int32_t i = 0; i < t->token_count; i++)
        free(t->tokens[i].bytes);
    for (size_t i = 0; i < t->pair_count; i++)
        free(t->pairs[i].fresh.ids);
    for (size_t i = 0; i < t->queue_count; i++)
        free(t->queue[i].words.ids);
    free(t->words);
    free(t->tokens);
    free(t->pairs);
    free(t->changed.ids);
    free(t->queue);
    free(t->merge_order);
    byte_map_free(&t->ids);
    byte_map_free(&t->indices);
    byte_map_free(&t->merges);
}

/* ---- tokenizer.json ------------------------------------------------------------------------------------------------ */

/* The name of a token. The caller frees it. */
static char *name_of(const trainer *t, int32_t id)
{
    char *name = malloc(2 * t->tokens[id].count + 1);
    if (name != NULL)
        token_name(t->tokens[id].bytes, t->tokens[id].count, name);
    return name;
}

static json_t *vocabulary_of(const trainer *t, const char *end)
{
    json_t *vocabulary = json_object();
    for (int32_t id = 0; id < t->token_count; id++) {
        char *name = id == 0 ? strdup(end) : name_of(t, id);
        if (name == NULL || json_object_set_new(vocabulary, name, json_integer(id)) != 0) {
            json_decref(vocabulary);
            vocabulary = NULL;
        }
        free(name);
    }
    return vocabulary;
}

/* Pairs that were merged twice count once, where they were merged last. Texts "a b" are read by every version of the package. */
static json_t *merges_of(const trainer *t)
{
    json_t *merges = json_array();
    for (size_t i = 0; i < t->merge_count; i++) {
        const id_pair pair = t->merge_order[i];
        if (*byte_map_find(&t->merges, &pair, sizeof pair) != (int64_t)i)
            continue;
        char *left = name_of(t, pair.left), *right = name_of(t, pair.right);
        if (left == NULL || right == NULL || json_array_append_new(merges, json_sprintf("%s %s", left, right)) != 0) {
            json_decref(merges);
            merges = NULL;
        }
        free(left);
        free(right);
    }
    return merges;
}

static bool write_json(const trainer *t, const char *end, const char *path, io_writer *writer, io_error *error)
{
    io_json_begin();
    json_t *root = json_pack(
        "{s:s, s:n, s:n, s:[{s:i, s:s, s:b, s:b, s:b, s:b, s:b}], s:n, s:{s:s, s:b, s:b, s:b}, s:n, s:{s:s, s:b, s:b, s:b}, "
        "s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}}",
        "version", "1.0", "truncation", "padding", "added_tokens", "id", 0, "content", end, "single_word", 0, "lstrip",
        0, "rstrip", 0, "normalized", 0, "special", 1, "normalizer", "pre_tokenizer", "type", "ByteLevel",
        "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 1, "post_processor", "decoder", "type", "ByteLevel",
        "add_prefix_space", 1, "trim_offsets", 1, "use_regex", 1, "model", "type", "BPE", "dropout", "unk_token",
        "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0,
        "vocab", vocabulary_of(t, end), "merges", merges_of(t));
    char *text = root == NULL ? NULL : json_dumps(root, JSON_INDENT(2));
    const bool good = !io_json_end() || text == NULL
                          ? io_no_memory(error, path, "tokenizer")
                          : io_write(writer, text, strlen(text), error) && io_write(writer, "\n", 1, error);
    free(text);
    json_decref(root);
    return good;
}

bool tokenizer_train(const byte_map *counts, int32_t size, const char *end, const char *path, io_writer *writer,
                     io_error *error)
{
    trainer t = {.size = size};
    const bool good =
        train(&t, counts, end) ? write_json(&t, end, path, writer, error) : io_no_memory(error, path, "training");
    trainer_free(&t);
    return good;
}
