/* SPDX-License-Identifier: Apache-2.0
 *
 * run_command.c: `cotangent run` makes one call of an op on tensors in files. The op's tables define the options: each
 * tensor of the argument struct is an option --NAME FILE, and each other member is an option --NAME VALUE. */
#include "check/signature.h"
#include "check/verify.h"
#include "commands.h"
#include "core/tensor.h"
#include "tensor_file.h"

#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KEY_FIELD = 0x1000, KEY_OPTION = 0x2000, KEY_COMMON = 0x3000, MAX_OPTIONS = 128 };
enum { KEY_IN = KEY_COMMON, KEY_OUT, KEY_OUTPUTS, KEY_DTYPE, KEY_VERIFY, KEY_BACKEND, KEY_KERNEL, KEY_THREADS };

typedef struct run_input {
    const cot_op *op;
    int number; /* number of the direction */
    const cot_direction *direction;
    _Alignas(16) char args[COT_MAX_ARGS];
    const char *input_paths[COT_MAX_FIELDS]; /* FILE of each tensor's --NAME FILE */
    cot_dtype dtypes[COT_MAX_FIELDS];        /* dtypes that --dtype gives to outputs */
    uint32_t output_mask;                    /* the outputs to compute; bit: number of the field */
    bool has_outputs_option;                 /* whether --outputs was given */
    const char *in, *out, *kernel;
    bool verify;
    cot_backend backend;
    int threads;
    tensor_file files[COT_MAX_FIELDS + 1]; /* one for each field, and the last one for --in */
} run_input;

/* ---- the command line --------------------------------------------------------------------------------- */

static const struct argp_option COMMON_OPTIONS[] = {
    {0, 0, 0, 0, "Files:", 4},
    {"in", KEY_IN, "FILE.safetensors", 0, "Inputs by their names", 0},
    {"out", KEY_OUT, "DIR|FILE.safetensors", 0, "Where the outputs go: DIR/NAME.npy each, or one file", 0},
    {"outputs", KEY_OUTPUTS, "NAME,...", 0, "Compute only these (all)", 0},
    {"dtype", KEY_DTYPE, "NAME=DTYPE", 0, "An output's dtype, where the op allows a choice; may be repeated", 0},
    {"verify", KEY_VERIFY, 0, 0, "Compare the outputs with the oracle; on a failure, nothing is written", 0},
    {0, 0, 0, 0, "Where it runs:", 5},
    {"backend", KEY_BACKEND, "cpu|cuda|hip", 0, "(cpu)", 0},
    {"kernel", KEY_KERNEL, "NAME", 0, "Use only this kernel", 0},
    {"threads", KEY_THREADS, "N", 0, "CPU threads (all)", 0},
    {0}};

#define OUTPUTS_NOTE                                                                                                       \
    "\n\nAll outputs are written, or none. A file that is replaced keeps its permissions, and a symbolic link is written " \
    "through."

static int field_number(const cot_direction *direction, const char *name, size_t length)
{
    for (int f = 0; f < direction->field_count; f++)
        if (strlen(direction->fields[f].name) == length && strncmp(direction->fields[f].name, name, length) == 0)
            return f;
    return -1;
}

static int output_number(const struct argp_state *state, const run_input *input, const char *option, const char *name,
                         size_t length)
{
    const int f = field_number(input->direction, name, length);
    if (f < 0 || input->direction->fields[f].role == COT_INPUT)
        argp_error(state, "%s names '%.*s', which is no output of %s", option, (int)length, name,
                   input->direction->call);
    return f;
}

static void parse_outputs(const struct argp_state *state, run_input *input, const char *names)
{
    input->output_mask = 0;
    input->has_outputs_option = true;
    for (const char *name = names;; name++) {
        const size_t length = strcspn(name, ",");
        input->output_mask |= 1u << output_number(state, input, "--outputs", name, length);
        name += length;
        if (*name == '\0')
            return;
    }
}

static void parse_dtype(const struct argp_state *state, run_input *input, const char *text)
{
    const size_t length = strcspn(text, "=");
    const int f = output_number(state, input, "--dtype", text, length);
    for (int dtype = COT_F32; dtype <= COT_U8; dtype++)
        if (text[length] == '=' && strcmp(text + length + 1, cot_dtype_name((cot_dtype)dtype)) == 0)
            input->dtypes[f] = (cot_dtype)dtype;
    if (input->dtypes[f] == COT_DTYPE_NONE)
        argp_error(state, "--dtype is '%s', expected NAME=f32, f16, bf16, f64, i32 or u8", text);
}

/* Returns the index of `text` among words such as "none silu", or -1. */
static int32_t find_word(const char *words, const char *text)
{
    int32_t number = 0;
    for (const char *word = words; *word != '\0'; number++) {
        const size_t length = strcspn(word, " ");
        if (strlen(text) == length && strncmp(word, text, length) == 0)
            return number;
        word += length + (word[length] == ' ');
    }
    return -1;
}

static void parse_option_value(const struct argp_state *state, const cot_option *option, const char *text, char *args)
{
    char *end = (char *)text;
    void *member = args + option->offset;
    errno = 0;
    switch (option->kind) {
    case COT_OPTION_ENUM: {
        const int32_t number = find_word(option->words, text);
        if (number < 0)
            argp_error(state, "--%s is '%s', expected one of: %s", option->name, text, option->words);
        memcpy(member, &number, sizeof number);
        return;
    }
    case COT_OPTION_I32: *(int32_t *)member = (int32_t)strtol(text, &end, 10); break;
    case COT_OPTION_I64: *(int64_t *)member = strtoll(text, &end, 10); break;
    case COT_OPTION_U64: *(uint64_t *)member = strtoull(text, &end, 10); break;
    case COT_OPTION_F32: *(float *)member = strtof(text, &end); break;
    case COT_OPTION_F64: *(double *)member = strtod(text, &end); break;
    }
    const bool is_out_of_range = option->kind == COT_OPTION_I32 && strtol(text, NULL, 10) != *(int32_t *)member;
    const bool is_negative = option->kind == COT_OPTION_U64 && strchr(text, '-') != NULL;
    if (end == text || *end != '\0' || errno != 0 || is_out_of_range || is_negative)
        argp_error(state, "--%s is '%s', expected %s, as in --%s=1", option->name, text,
                   option->kind >= COT_OPTION_F32   ? "a number"
                   : option->kind == COT_OPTION_I32 ? "an integer of 32 bits"
                   : option->kind == COT_OPTION_U64 ? "a whole number of 64 bits"
                                                    : "an integer of 64 bits",
                   option->name);
}

/* Returns the number of the input with the name `out`, or -1 if the direction has none. */
static int input_called_out(const cot_direction *direction)
{
    const int f = field_number(direction, "out", strlen("out"));
    return f >= 0 && direction->fields[f].role == COT_INPUT ? f : -1;
}

/* Outputs go to a folder or to a FILE.safetensors. If the direction has an input with the name `out`, a FILE.npy or
 * FILE.safetensors:NAME is this input. */
static void parse_out(run_input *input, const char *path)
{
    const int f = input_called_out(input->direction);
    const size_t length = strlen(path);
    const bool is_npy = length >= 4 && strcmp(path + length - 4, ".npy") == 0;
    if (f >= 0 && (is_npy || strstr(path, ".safetensors:") != NULL))
        input->input_paths[f] = path;
    else
        input->out = path;
}

static error_t parse(int key, char *argument, struct argp_state *state)
{
    run_input *input = state->input;
    switch (key) {
    case KEY_IN:
        if (!is_safetensors_name(argument))
            argp_error(state, "--in is '%s', expected a FILE.safetensors; a .npy goes with the tensor's own option",
                       argument);
        input->in = argument;
        return 0;
    case KEY_OUT: parse_out(input, argument); return 0;
    case KEY_OUTPUTS: parse_outputs(state, input, argument); return 0;
    case KEY_DTYPE: parse_dtype(state, input, argument); return 0;
    case KEY_VERIFY: input->verify = true; return 0;
    case KEY_BACKEND: input->backend = parse_backend(state, argument); return 0;
    case KEY_KERNEL: input->kernel = argument; return 0;
    case KEY_THREADS: input->threads = (int)parse_number(state, "--threads", argument, 1, 4096); return 0;
    case ARGP_KEY_ARG: argp_error(state, "unexpected argument '%s'", argument); return 0;
    case ARGP_KEY_END:
        if (input->out == NULL && !input->verify)
            argp_error(state, "neither --out nor --verify: expected at least one of them");
        return 0;
    default: break;
    }
    if (key >= KEY_OPTION && key < KEY_COMMON)
        parse_option_value(state, &input->direction->options[key - KEY_OPTION], argument, input->args);
    else if (key >= KEY_FIELD && key < KEY_OPTION)
        input->input_paths[key - KEY_FIELD] = argument;
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

/* The option of a tensor is its name, or --tensor-NAME if COMMON_OPTIONS has an option of that name. */
static const char *option_of_tensor(const char *name)
{
    static char prefixed[64];
    for (const struct argp_option *option = COMMON_OPTIONS; option->name != NULL || option->doc != NULL; option++) {
        if (option->name == NULL || strcmp(option->name, name) != 0)
            continue;
        snprintf(prefixed, sizeof prefixed, "tensor-%s", name);
        return prefixed;
    }
    return name;
}

/* ---- --help ------------------------------------------------------------------------------------------- */

static cot_tensor *tensor_of(run_input *input, int f)
{
    return cot_field_tensor(&input->direction->fields[f], input->args);
}

/* The fields that every valid call must have. */
typedef struct requirement {
    const cot_direction *direction;
    int number;
    uint32_t fields; /* bit: number of the field */
} requirement;

/* Removes the fields that this case shows to be optional: the case does not have the field, or is valid without it. */
static bool narrow_requirement(void *context, const cot_case *c)
{
    requirement *r = context;
    _Alignas(16) char args[COT_MAX_ARGS], problem[COT_MAX_PROBLEM];
    for (int f = 0; c->direction == r->number && f < r->direction->field_count; f++) {
        if ((r->fields >> f & 1) == 0)
            continue;
        memcpy(args, c->args, sizeof args);
        cot_tensor *tensor = cot_field_tensor(&r->direction->fields[f], args);
        const bool was_present = cot_is_present(tensor);
        *tensor = (cot_tensor){0};
        if (!was_present || r->direction->validate(r->direction->call, args, false, problem) == COT_OK)
            r->fields &= ~(1u << f);
    }
    return true;
}

static uint32_t required_fields(const run_input *input)
{
    requirement r = {input->direction, input->number, UINT32_MAX};
    find_cases(input->op)->each(narrow_requirement, &r);
    return r.fields;
}

static void format_word(const char *words, int32_t number, char *text, size_t size)
{
    while (number-- > 0)
        words += strcspn(words, " ") + 1;
    snprintf(text, size, "%.*s", (int)strcspn(words, " "), words);
}

/* Formats an option's value in the initialised arguments. */
static void format_default(const cot_option *option, const char *args, char *text, size_t size)
{
    int32_t i32;
    int64_t i64;
    float f32;
    double f64;
    const void *member = args + option->offset;
    switch (option->kind) {
    case COT_OPTION_ENUM:
        memcpy(&i32, member, sizeof i32);
        format_word(option->words, i32, text, size);
        return;
    case COT_OPTION_I32: memcpy(&i32, member, sizeof i32), snprintf(text, size, "%" PRId32, i32); return;
    case COT_OPTION_I64:
    case COT_OPTION_U64: memcpy(&i64, member, sizeof i64), snprintf(text, size, "%" PRId64, i64); return;
    case COT_OPTION_F32: memcpy(&f32, member, sizeof f32), snprintf(text, size, "%g", (double)f32); return;
    case COT_OPTION_F64: memcpy(&f64, member, sizeof f64), snprintf(text, size, "%g", f64); return;
    }
}

/* Formats " [B,D,T]" from the signature's "x[B,D,T]". Writes "" if another field determines the shape. */
static void format_shape(const char *signature, const char *name, char *text, size_t size)
{
    const size_t length = strlen(name);
    text[0] = '\0';
    for (const char *token = signature; token != NULL && *token != '\0'; token += strspn(token, " ")) {
        const size_t end = strcspn(token, " "), bracket = strcspn(token, "[ ");
        if (strncmp(token, name, length) == 0 && strchr("[:", token[length]) != NULL && bracket < end)
            snprintf(text, size, " %.*s", (int)(end - bracket), token + bracket);
        token += end;
    }
}

static void describe_field(const cot_direction *direction, int f, bool is_required, char *text, size_t size)
{
    const cot_field *field = &direction->fields[f];
    char shape[64];
    format_shape(direction->signature, field->name, shape, sizeof shape);
    if (field->accumulates)
        snprintf(text, size, "Old value, with --accumulate 1");
    else
        snprintf(text, size, "%s input%s%s%s", is_required ? "Required" : "Optional", shape,
                 field->role == COT_INPUT_OUTPUT ? ", and output in its place" : "",
                 f == input_called_out(direction) ? "; --out FILE.npy gives it too" : "");
}

/* Makes the option table of a direction: its tensors, its other members and the common options. */
static void make_option_table(const run_input *input, struct argp_option table[MAX_OPTIONS])
{
    enum { REQUIRED = 1, OPTIONAL, OPTIONS };
    static char docs[MAX_OPTIONS][160];
    const cot_direction *direction = input->direction;
    const uint32_t required = required_fields(input);
    int count = 0;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_field *field = &direction->fields[f];
        if (field->role == COT_OUTPUT && !field->accumulates)
            continue;
        const bool is_required = required >> f & 1;
        describe_field(direction, f, is_required, docs[count], sizeof docs[count]);
        table[count] = (struct argp_option){.name = option_of_tensor(field->name),
                                            .key = KEY_FIELD + f,
                                            .arg = "FILE",
                                            .doc = docs[count],
                                            .group = is_required ? REQUIRED : OPTIONAL};
        count++;
    }
    for (int o = 0; o < direction->option_count; o++) {
        const cot_option *option = &direction->options[o];
        const char *meaning = option->words != NULL ? option->words : option->note;
        char value[64] = "";
        format_default(option, input->args, value, sizeof value);
        if (meaning == NULL)
            snprintf(docs[count], sizeof docs[count], "Default %s", value);
        else if (strstr(meaning, "default") != NULL)
            snprintf(docs[count], sizeof docs[count], "%s", meaning);
        else
            snprintf(docs[count], sizeof docs[count], "%s (default %s)", meaning, value);
        table[count] = (struct argp_option){.name = option->name,
                                            .key = KEY_OPTION + o,
                                            .arg = option->kind == COT_OPTION_ENUM ? "WORD" : "N",
                                            .doc = docs[count],
                                            .group = OPTIONS};
        count++;
    }
    memcpy(table + count, COMMON_OPTIONS, sizeof COMMON_OPTIONS);
}

/* ---- "cotangent run OP DIRECTION", before the rest can be understood ------------------------------------- */

static error_t parse_direction(int key, char *argument, struct argp_state *state)
{
    run_input *input = state->input;
    (void)argument;
    switch (key) {
    case ARGP_KEY_ARGS: {
        char **words = state->argv + state->next;
        input->op = find_op(state, words[0]);
        if (state->argc - state->next < 2)
            argp_error(state, "DIRECTION is missing");
        input->number = find_direction(state, input->op, words[1]);
        input->direction = &input->op->directions[input->number];
        return 0;
    }
    case ARGP_KEY_NO_ARGS: argp_error(state, "OP is missing"); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static void parse_command_line(run_input *input, int argc, char **argv)
{
    static const struct argp first_parser = {
        COMMON_OPTIONS,
        parse_direction,
        "OP DIRECTION --TENSOR FILE... [--OPTION VALUE...]",
        "Runs an op on tensors in files.\v"
        "TENSOR and OPTION are the members of the op's argument struct: `cotangent run OP DIRECTION --help` lists them. "
        "FILE is a .npy, or FILE.safetensors:NAME. As in\n"
        "  cotangent run causal_conv1d forward --x x.npy --weight w.npy --activation silu --out ." OUTPUTS_NOTE,
        0,
        0,
        0};
    int words = 1;
    while (words < argc && words < 3 && argv[words][0] != '-')
        words++;
    const bool help_requested =
        words < 3 && words < argc &&
        (strcmp(argv[words], "--help") == 0 || strcmp(argv[words], "-?") == 0 || strcmp(argv[words], "--usage") == 0);
    parse_arguments(&first_parser, help_requested ? words + 1 : words, argv, input);
    static struct argp_option table[MAX_OPTIONS];
    static char name[128], doc[2048];
    if (input->direction->init != NULL)
        input->direction->init(input->args);
    else
        memcpy(input->args, &input->direction->args_size, sizeof input->direction->args_size);
    make_option_table(input, table);
    snprintf(name, sizeof name, "cotangent run %s %s", input->op->name, input->direction->name);
    snprintf(doc, sizeof doc, "One call of cot_%s on tensors in files.\vThe shapes: %s%s", input->direction->call,
             input->direction->signature != NULL ? input->direction->signature : "", OUTPUTS_NOTE);
    const struct argp second_parser = {table, parse, "", doc, 0, 0, 0};
    for (int f = 0; f < input->direction->field_count; f++)
        if (input->direction->fields[f].role != COT_INPUT)
            input->output_mask |= 1u << f;
    argv[2] = name;
    parse_arguments(&second_parser, argc - 2, argv + 2, input);
}

/* ---- inputs ------------------------------------------------------------------------------------------- */

static bool set_error(io_error *error, const char *message)
{
    *error = (io_error){.out_of_memory = false};
    snprintf(error->text, sizeof error->text, "%s", message);
    return false;
}

static bool has_initial_value(const run_input *input, int f)
{
    return field_has_initial_value(input->direction, &input->direction->fields[f], input->args);
}

static bool is_field_of_op(const cot_op *op, const char *name)
{
    for (int d = 0; d < op->direction_count; d++)
        if (field_number(&op->directions[d], name, strlen(name)) >= 0)
            return true;
    return false;
}

/* Loads the tensors of --in that this direction reads and that have no option of their own. Tensors for the op's other
 * directions are ignored. A name that no direction has is an error, because a misspelled input would be ignored
 * otherwise. */
static bool load_named_inputs(run_input *input, io_error *error)
{
    tensor_file *file = &input->files[COT_MAX_FIELDS];
    if (!tensor_file_open(file, input->in, error))
        return false;
    for (int i = 0; i < file->count; i++) {
        const char *name = tensor_file_name(file, i);
        const int f = field_number(input->direction, name, strlen(name));
        if (!is_field_of_op(input->op, name))
            return io_fail(error, input->in, "has a tensor \"%.80s\", which is none of %s's", name, input->op->name);
        if (f >= 0 && input->input_paths[f] == NULL && has_initial_value(input, f) &&
            !tensor_file_get(file, i, tensor_of(input, f), error))
            return false;
    }
    return true;
}

/* Without --outputs: removes outputs whose shape is unknown, such as the gradient of a missing input. If no output has
 * a shape, a required input is missing, and the op reports it. */
static void drop_outputs_without_shape(run_input *input)
{
    char why[256];
    uint32_t shaped_mask = 0;
    for (int f = 0; f < input->direction->field_count; f++) {
        _Alignas(16) char args[COT_MAX_ARGS];
        memcpy(args, input->args, sizeof args);
        if ((input->output_mask >> f & 1) != 0 &&
            shape_outputs(input->direction, args, 1u << f, why, sizeof why) == NULL)
            shaped_mask |= 1u << f;
    }
    if (shaped_mask != 0)
        input->output_mask = shaped_mask;
}

static bool load_inputs(run_input *input, io_error *error)
{
    if (input->in != NULL && !load_named_inputs(input, error))
        return false;
    for (int f = 0; f < input->direction->field_count; f++) {
        const cot_field *field = &input->direction->fields[f];
        if (input->input_paths[f] != NULL && !has_initial_value(input, f))
            return io_fail(error, input->input_paths[f], "%s is written only, but with --accumulate 1", field->name);
        if (input->input_paths[f] != NULL &&
            !tensor_file_open_one(&input->files[f], input->input_paths[f], tensor_of(input, f), error))
            return false;
    }
    if (!input->has_outputs_option)
        drop_outputs_without_shape(input);
    for (int f = 0; f < input->direction->field_count; f++) {
        const cot_field *field = &input->direction->fields[f];
        if (field->role == COT_OUTPUT && has_initial_value(input, f) && (input->output_mask >> f & 1) != 0 &&
            !cot_is_present(tensor_of(input, f)))
            return io_fail(error, input->direction->call, "%s is added to: --%s gives its old value", field->name,
                           field->name);
    }
    return true;
}

/* Gives the outputs their shapes, and checks the call by cot_op_explain. *kernel is the kernel that would run. */
static cot_status prepare(run_input *input, const cot_queue *queue, const cot_kernel **kernel, io_error *error)
{
    char why[256];
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    const bool is_shaped = shape_outputs(input->direction, input->args, input->output_mask, why, sizeof why) == NULL;
    for (int f = 0; f < input->direction->field_count; f++)
        if (input->dtypes[f] != COT_DTYPE_NONE && cot_is_present(tensor_of(input, f)) &&
            tensor_of(input, f)->data == NULL)
            tensor_of(input, f)->dtype = input->dtypes[f];
    const cot_status status = cot_op_explain(input->direction, queue, input->args, choices, &count);
    if (status != COT_OK) { /* its message also names a missing input without which an output has no shape */
        set_error(error, cot_error_message());
        return status;
    }
    if (!is_shaped) {
        io_fail(error, input->direction->call, "%s", why);
        return COT_INVALID_SHAPE;
    }
    for (int i = 0; i < count; i++)
        if (choices[i].chosen)
            *kernel = choices[i].kernel;
    return COT_OK;
}

/* Allocates the call's memory and copies the inputs. The call may run on another device, or change in-out tensors. */
static void copy_inputs(run_input *input, bound_case *b)
{
    memcpy(b->args, input->args, sizeof b->args);
    for (int f = 0; f < input->direction->field_count; f++) {
        const cot_tensor *tensor = tensor_of(input, f);
        b->fields[f] = storage_make(tensor, 0, false);
        if (!cot_is_present(tensor))
            continue;
        *cot_field_tensor(&input->direction->fields[f], b->args) = b->fields[f].view;
        const size_t bytes = (size_t)cot_elements(tensor) * cot_dtype_size(tensor->dtype);
        if (has_initial_value(input, f) && bytes > 0) /* tensors of files have no gaps, in either order */
            memcpy(b->fields[f].view.data, tensor->data, bytes);
    }
}

/* ---- outputs ------------------------------------------------------------------------------------------ */

/* Checks before the call that the outputs can be written. */
static bool check_output_path(const run_input *input, io_error *error)
{
    struct stat status;
    if (input->out == NULL)
        return true;
    const bool exists = stat(input->out, &status) == 0;
    if (is_safetensors_name(input->out)) {
        if (exists && !S_ISREG(status.st_mode))
            return io_fail(error, input->out, "is there and is no regular file");
    } else if (exists && !S_ISDIR(status.st_mode)) {
        return io_fail(error, input->out, "is a file, expected a folder or a FILE.safetensors");
    }
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", input->out);
    const char *directory = exists && S_ISDIR(status.st_mode) ? input->out : dirname(folder);
    return access(directory, W_OK | X_OK) == 0 || io_fail(error, input->out, "%s", strerror(errno));
}

static bool is_output(const run_input *input, const bound_case *b, int f)
{
    return input->direction->fields[f].role != COT_INPUT && (input->output_mask >> f & 1) != 0 &&
           cot_is_present(&b->fields[f].view);
}

static bool write_into_folder(const char *folder, const safetensors_item *items, int count, io_error *error)
{
    io_writer writers[COT_MAX_FIELDS];
    int prepared = 0;
    for (; prepared < count; prepared++) {
        char path[4096];
        if (snprintf(path, sizeof path, "%s/%s.npy", folder, items[prepared].name) >= (int)sizeof path) {
            io_fail(error, folder, "the name is too long");
            break;
        }
        if (!npy_prepare(&writers[prepared], path, &items[prepared].tensor, error))
            break;
    }
    if (prepared == count)
        return io_publish(writers, count, error);
    while (prepared > 0)
        io_abandon(&writers[--prepared]);
    return false;
}

/* Writes the outputs. The folder is created here, after all work that can end the program. */
static bool write_outputs(const run_input *input, const bound_case *b, io_error *error)
{
    safetensors_item items[COT_MAX_FIELDS];
    int count = 0;
    for (int f = 0; f < input->direction->field_count; f++)
        if (is_output(input, b, f))
            items[count++] = (safetensors_item){input->direction->fields[f].name, b->fields[f].view};
    if (is_safetensors_name(input->out))
        return safetensors_write(input->out, items, count, NULL, error);
    const bool made_folder = mkdir(input->out, 0777) == 0;
    if (!made_folder && errno != EEXIST)
        return io_fail(error, input->out, "%s", strerror(errno));
    const bool good = write_into_folder(input->out, items, count, error);
    if (!good && made_folder)
        rmdir(input->out);
    return good;
}

static void print_result(const run_input *input, const bound_case *b, const cot_kernel *kernel, const cot_queue *queue)
{
    printf("%s by %s", input->direction->call, kernel->name);
    if (kernel->backend == COT_BACKEND_CPU)
        printf(" on %d threads", (int)cot_queue_threads(queue));
    putchar('\n');
    for (int f = 0; f < input->direction->field_count; f++) {
        const cot_tensor *view = &b->fields[f].view;
        if (!is_output(input, b, f))
            continue;
        printf("  %s %s [", input->direction->fields[f].name, cot_dtype_name(view->dtype));
        for (int axis = 0; axis < view->rank; axis++)
            printf("%s%" PRId64, axis > 0 ? "," : "", view->shape[axis]);
        printf("]\n");
    }
}

/* ---- the call ----------------------------------------------------------------------------------------- */

static int print_error(const io_error *error, int status)
{
    fflush(stdout);
    fprintf(stderr, "cotangent: %s\n", error->text);
    return status;
}

static int run_bound(const run_input *input, bound_case *b, cot_queue *queue, const cot_kernel *kernel)
{
    io_error error = {.text = ""};
    verification v;
    cot_status status = COT_OK;
    bool verified = true;
    if (input->verify)
        status = verification_begin(&v, find_cases(input->op), input->number, b->args);
    if (status == COT_OK)
        status = bound_case_run(b, input->direction, queue);
    if (status == COT_OK) {
        print_result(input, b, kernel, queue);
        verified = !input->verify || verification_end(&v, b->args, kernel, stdout);
    } else {
        set_error(&error, cot_error_message());
    }
    if (input->verify)
        verification_free(&v);
    if (status != COT_OK)
        return print_error(&error, exit_status(status));
    if (!verified) {
        io_fail(&error, input->direction->call, "beyond the error rule; nothing is written");
        return print_error(&error, 1);
    }
    return input->out == NULL || write_outputs(input, b, &error) ? 0 : print_error(&error, 1);
}

static int run_on_queue(run_input *input, cot_queue *queue)
{
    io_error error;
    const cot_kernel *kernel = NULL;
    if (!load_inputs(input, &error))
        return print_error(&error, error.out_of_memory ? 1 : 2);
    const cot_status prepared = prepare(input, queue, &kernel, &error);
    if (prepared != COT_OK)
        return print_error(&error, exit_status(prepared));
    if (!check_output_path(input, &error))
        return print_error(&error, 2);
    static bound_case b;
    copy_inputs(input, &b);
    const int exit_code = run_bound(input, &b, queue, kernel);
    bound_case_free(&b, input->direction);
    return exit_code;
}

int command_run(int argc, char **argv)
{
    static run_input input;
    parse_command_line(&input, argc, argv);
    char forced[256];
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = input.backend;
    options.threads = input.threads;
    snprintf(forced, sizeof forced, "%s=%s", input.op->name, input.kernel != NULL ? input.kernel : "");
    options.kernels = input.kernel != NULL ? forced : NULL;
    cot_queue *queue = NULL;
    io_error error;
    const cot_status created = cot_queue_create(&options, &queue);
    if (created != COT_OK) {
        set_error(&error, cot_error_message());
        return print_error(&error, exit_status(created));
    }
    const int status = run_on_queue(&input, queue);
    for (size_t i = 0; i < sizeof input.files / sizeof *input.files; i++)
        tensor_file_close(&input.files[i]);
    cot_queue_destroy(queue);
    return status;
}
