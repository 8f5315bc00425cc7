/* SPDX-License-Identifier: Apache-2.0 */
#include "pretrained.h"

#include "io/safetensors.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_ITEMS_PER_LAYER = 12, OUTER_ITEMS = 7, PREFIX_SIZE = 80, NAME_SIZE = 128, MAX_PATH_LENGTH = 4096 };

static const char GPT2_PREFIX[] = "transformer."; /* files of the first GPT-2 do not have it */

/* The tensors of a file, as views of the parameters. */
typedef struct item_list {
    int count;
    char (*names)[NAME_SIZE];
    safetensors_item *items;
} item_list;

bool pretrained_supports(const model_config *config)
{
    return config->attention == 1 && config->mlp > 0 && config->streams == 0 && config->dense == 0 &&
           (!config->gpt2 || config->inner == config->width);
}

/* ---- the tensors -------------------------------------------------------------------------------------- */

static bool create_items(item_list *list, const model *m, const char *path, io_error *error)
{
    const size_t count = (size_t)m->config.layers * MAX_ITEMS_PER_LAYER + OUTER_ITEMS;
    *list = (item_list){.names = calloc(count, NAME_SIZE), .items = calloc(count, sizeof(safetensors_item))};
    return (list->names != NULL && list->items != NULL) || io_no_memory(error, path, "for its tensors");
}

static void free_items(item_list *list)
{
    free(list->names);
    free(list->items);
}

static void add(item_list *list, const char *prefix, const char *name, cot_tensor tensor)
{
    snprintf(list->names[list->count], NAME_SIZE, "%s%s", prefix, name);
    list->items[list->count] = (safetensors_item){list->names[list->count], tensor};
    list->count++;
}

static cot_tensor whole(const parameter *p)
{
    return cot_tensor_contiguous(p->value, REAL_DTYPE, p->rank, p->shape);
}

/* GPT-2 stores the matrix of a product as [in,out]. */
static cot_tensor transposed(const parameter *p)
{
    cot_tensor t = whole(p);
    t.shape[0] = p->shape[1], t.shape[1] = p->shape[0];
    t.stride[0] = 1, t.stride[1] = p->shape[1];
    return t;
}

static cot_tensor rows_of(const parameter *p, int64_t first, int64_t count)
{
    cot_tensor t = whole(p);
    t.data = p->value + first * p->shape[1];
    t.shape[0] = count;
    return t;
}

static void add_gpt2_block(item_list *list, const mixer_block *block, int64_t layer, const char *norm, const char *in,
                           const char *out)
{
    char prefix[PREFIX_SIZE];
    snprintf(prefix, sizeof prefix, "%sh.%lld.%s.", GPT2_PREFIX, (long long)layer, norm);
    add(list, prefix, "weight", whole(block->norm.gain));
    add(list, prefix, "bias", whole(block->norm.bias));
    snprintf(prefix, sizeof prefix, "%sh.%lld.%s.", GPT2_PREFIX, (long long)layer, in);
    add(list, prefix, "weight", transposed(block->w_in));
    add(list, prefix, "bias", whole(block->bias_in));
    snprintf(prefix, sizeof prefix, "%sh.%lld.%s.", GPT2_PREFIX, (long long)layer, out);
    add(list, prefix, "weight", transposed(block->w_out));
    add(list, prefix, "bias", whole(block->bias_out));
}

static void add_gpt2(item_list *list, const model *m)
{
    add(list, GPT2_PREFIX, "wte.weight", whole(m->embedding));
    add(list, GPT2_PREFIX, "wpe.weight", whole(m->positions));
    for (int64_t layer = 0; layer < m->config.layers; layer++) {
        add_gpt2_block(list, &m->blocks[2 * layer], layer, "ln_1", "attn.c_attn", "attn.c_proj");
        add_gpt2_block(list, &m->blocks[2 * layer + 1], layer, "ln_2", "mlp.c_fc", "mlp.c_proj");
    }
    add(list, GPT2_PREFIX, "ln_f.weight", whole(m->norm.gain));
    add(list, GPT2_PREFIX, "ln_f.bias", whole(m->norm.bias));
}

static void add_llama(item_list *list, const model *m)
{
    const int64_t inner = m->config.inner, mlp = m->config.mlp;
    add(list, "model.", "embed_tokens.weight", whole(m->embedding));
    for (int64_t layer = 0; layer < m->config.layers; layer++) {
        const mixer_block *attention = &m->blocks[2 * layer], *feed_forward = &m->blocks[2 * layer + 1];
        const int64_t kv = (attention->w_in->shape[0] - inner) / 2;
        char prefix[PREFIX_SIZE];
        snprintf(prefix, sizeof prefix, "model.layers.%lld.", (long long)layer);
        add(list, prefix, "input_layernorm.weight", whole(attention->norm.gain));
        add(list, prefix, "self_attn.q_proj.weight", rows_of(attention->w_in, 0, inner));
        add(list, prefix, "self_attn.k_proj.weight", rows_of(attention->w_in, inner, kv));
        add(list, prefix, "self_attn.v_proj.weight", rows_of(attention->w_in, inner + kv, kv));
        add(list, prefix, "self_attn.o_proj.weight", whole(attention->w_out));
        add(list, prefix, "post_attention_layernorm.weight", whole(feed_forward->norm.gain));
        add(list, prefix, "mlp.gate_proj.weight", rows_of(feed_forward->w_in, 0, mlp));
        add(list, prefix, "mlp.up_proj.weight", rows_of(feed_forward->w_in, mlp, mlp));
        add(list, prefix, "mlp.down_proj.weight", whole(feed_forward->w_out));
    }
    add(list, "model.", "norm.weight", whole(m->norm.gain));
    add(list, "", "lm_head.weight", whole(m->head));
}

static void add_all(item_list *list, const model *m)
{
    if (m->config.gpt2)
        add_gpt2(list, m);
    else
        add_llama(list, m);
}

/* ---- writing ------------------------------------------------------------------------------------------ */

static bool print_config(io_writer *writer, const model *m, io_error *error)
{
    const model_config *c = &m->config;
    const int64_t heads = model_heads(m), size = c->inner / heads,
                  kv_heads = (m->blocks[0].w_in->shape[0] - c->inner) / (2 * size);
    if (c->gpt2)
        return io_print(writer, error,
                        "{\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n"
                        "  \"vocab_size\": %lld,\n  \"n_positions\": %lld,\n  \"n_embd\": %lld,\n  \"n_layer\": %lld,\n"
                        "  \"n_head\": %lld,\n  \"n_inner\": %lld,\n  \"activation_function\": \"gelu_new\",\n"
                        "  \"layer_norm_epsilon\": 1e-05,\n  \"resid_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n"
                        "  \"attn_pdrop\": 0.0,\n  \"tie_word_embeddings\": true,\n  \"bos_token_id\": null,\n"
                        "  \"eos_token_id\": null,\n  \"torch_dtype\": \"float32\"\n}\n",
                        (long long)c->vocabulary, (long long)c->context, (long long)c->width, (long long)c->layers,
                        (long long)heads, (long long)c->mlp);
    return io_print(writer, error,
                    "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n"
                    "  \"vocab_size\": %lld,\n  \"max_position_embeddings\": %lld,\n  \"hidden_size\": %lld,\n"
                    "  \"num_hidden_layers\": %lld,\n  \"num_attention_heads\": %lld,\n"
                    "  \"num_key_value_heads\": %lld,\n  \"head_dim\": %lld,\n  \"intermediate_size\": %lld,\n"
                    "  \"hidden_act\": \"silu\",\n  \"rms_norm_eps\": 1e-06,\n  \"rope_theta\": 10000.0,\n"
                    "  \"attention_bias\": false,\n  \"mlp_bias\": false,\n  \"tie_word_embeddings\": false,\n"
                    "  \"bos_token_id\": null,\n  \"eos_token_id\": null,\n  \"torch_dtype\": \"float32\"\n}\n",
                    (long long)c->vocabulary, (long long)c->context, (long long)c->width, (long long)c->layers,
                    (long long)heads, (long long)kv_heads, (long long)size, (long long)c->mlp);
}

/* Replaces both files, or neither. */
static bool publish(const model *m, const item_list *list, const char *config, const char *tensors, io_error *error)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    io_writer writers[2];
    if (!safetensors_prepare(&writers[0], tensors, list->items, list->count, metadata, error))
        return false;
    bool good = io_open(&writers[1], config, error);
    if (good) {
        good = print_config(&writers[1], m, error) && io_publish(writers, 2, error);
        io_abandon(&writers[1]);
    }
    io_abandon(&writers[0]);
    return good;
}

bool pretrained_write(const model *m, const char *folder, io_error *error)
{
    char config[MAX_PATH_LENGTH], tensors[MAX_PATH_LENGTH];
    item_list list;
    if (snprintf(config, sizeof config, "%s/config.json", folder) >= (int)sizeof config ||
        snprintf(tensors, sizeof tensors, "%s/model.safetensors", folder) >= (int)sizeof tensors)
        return io_fail(error, folder, "the name is too long");
    bool good = create_items(&list, m, folder, error);
    if (good) {
        add_all(&list, m);
        good = publish(m, &list, config, tensors, error);
    }
    free_items(&list);
    return good;
}

/* A view of a value, moved to the gradient. All values are in one array, and all gradients in another. */
static void use_gradients(item_list *list, const model *m)
{
    for (int i = 0; i < list->count; i++) {
        cot_tensor *t = &list->items[i].tensor;
        t->data = m->parameters.gradients + ((real *)t->data - m->parameters.values);
    }
}

bool pretrained_write_gradients(const model *m, const int32_t *inputs, const int32_t *targets, int64_t sequences,
                                int64_t context, const char *path, io_error *error)
{
    const int64_t shape[] = {sequences, context};
    item_list list;
    bool good = create_items(&list, m, path, error);
    if (good) {
        add_all(&list, m);
        use_gradients(&list, m);
        add(&list, "", "inputs", cot_tensor_contiguous((void *)(uintptr_t)inputs, COT_I32, 2, shape));
        add(&list, "", "targets", cot_tensor_contiguous((void *)(uintptr_t)targets, COT_I32, 2, shape));
        good = safetensors_write(path, list.items, list.count, NULL, error);
    }
    free_items(&list);
    return good;
}

/* ---- reading ------------------------------------------------------------------------------------------ */

/* True if the file's tensor may have fewer rows. */
static bool has_padded_rows(const model *m, const cot_tensor *ours)
{
    return ours->data == m->embedding->value || ours->data == m->head->value;
}

static bool fits(const model *m, const cot_tensor *ours, const cot_tensor *file)
{
    if (file->rank != ours->rank || file->dtype != COT_F32)
        return false;
    for (int i = 0; i < ours->rank; i++)
        if (file->shape[i] != ours->shape[i] && (i > 0 || !has_padded_rows(m, ours) || file->shape[0] > ours->shape[0]))
            return false;
    return true;
}

static void copy(const cot_tensor *file, const cot_tensor *ours)
{
    const int64_t columns = ours->rank == 2 ? ours->shape[1] : 1;
    real *values = ours->data;
    const float *stored = file->data;
    for (int64_t r = 0; r < ours->shape[0]; r++)
        for (int64_t c = 0; c < columns; c++) {
            const int64_t at = r * ours->stride[0] + (ours->rank == 2 ? c * ours->stride[1] : 0);
            values[at] = r < file->shape[0] ? (real)stored[r * columns + c] : 0;
        }
}

/* Checks all tensors, and with `fill` copies them. */
static bool read_items(const model *m, safetensors_file *file, const char *path, const item_list *list, bool fill,
                       io_error *error)
{
    const size_t prefix = sizeof GPT2_PREFIX - 1;
    for (int i = 0; i < list->count; i++) {
        const safetensors_item *item = &list->items[i];
        const bool is_short = strncmp(item->name, GPT2_PREFIX, prefix) == 0 && safetensors_find(file, item->name) < 0;
        cot_tensor view;
        if (!safetensors_get_named(file, item->name + (is_short ? prefix : 0), &view, error))
            return false;
        if (!fits(m, &item->tensor, &view))
            return io_fail(error, path, "tensor \"%s\" has another dtype or shape than the model's", item->name);
        if (fill)
            copy(&view, &item->tensor);
    }
    return true;
}

bool pretrained_read(const model *m, const char *path, io_error *error)
{
    safetensors_file file;
    item_list list;
    if (!safetensors_open(&file, path, error))
        return false;
    bool good = create_items(&list, m, path, error);
    if (good) {
        add_all(&list, m);
        good = read_items(m, &file, path, &list, false, error) && read_items(m, &file, path, &list, true, error);
    }
    free_items(&list);
    safetensors_close(&file);
    return good;
}
