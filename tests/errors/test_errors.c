/* SPDX-License-Identifier: Apache-2.0
 * test_errors.c: checks docs/guide/errors_c.md. The page has a section for each status and no others. The library
 * produces each message of the page, and the page has each message that this test produces. */
#include "support.h"

#include <cotangent/cotangent.h>
#include <stdio.h>
#include <stdlib.h>

enum { B = 1, D = 2, T = 8, K = 3, MAX_STATUS = 32, MAX_MESSAGES = 64 };

/* ---- the page ---------------------------------------------------------------------------------------------- */

typedef struct section {
    char name[64];
    int messages;
} section;

typedef struct message {
    const section *section;
    char text[512];
    bool produced;
} message;

static section sections[MAX_STATUS];
static message messages[MAX_MESSAGES];
static size_t section_count, message_count;

static int read_page(void **state)
{
    (void)state;
    char line[512];
    FILE *page = fopen("docs/guide/errors_c.md", "r");
    if (page == NULL)
        return -1;
    while (fgets(line, sizeof line, page) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "## ", 3) == 0 && section_count < MAX_STATUS) {
            snprintf(sections[section_count++].name, sizeof sections->name, "%.60s", line + 3);
        } else if (strncmp(line, "    ", 4) == 0 && section_count > 0 && message_count < MAX_MESSAGES) {
            sections[section_count - 1].messages++;
            messages[message_count].section = &sections[section_count - 1];
            snprintf(messages[message_count++].text, sizeof messages->text, "%s", line + 4);
        }
    }
    fclose(page);
    return 0;
}

/* Asserts that the call failed with this status and that the page has the message in the section of the status. */
static void assert_documented(cot_status expected, cot_status status)
{
    assert_fails(status, expected, NULL);
    for (size_t i = 0; i < message_count; i++) {
        if (strcmp(messages[i].text, cot_error_message()) == 0 &&
            strcmp(messages[i].section->name, cot_status_name(status)) == 0) {
            messages[i].produced = true;
            return;
        }
    }
    fail_msg("docs/guide/errors_c.md does not have under %s: %s", cot_status_name(status), cot_error_message());
}

static void every_status_has_a_section(void **state)
{
    (void)state;
    int status = 0;
    for (; strcmp(cot_status_name((cot_status)status), "COT_?") != 0; status++) {
        if ((size_t)status >= section_count || strcmp(sections[status].name, cot_status_name((cot_status)status)) != 0)
            fail_msg("docs/guide/errors_c.md has no section %s at its place", cot_status_name((cot_status)status));
    }
    assert_int_equal(section_count, status);
}

/* ---- faulty calls -------------------------------------------------------------------------------------------- */

static float x[B * D * T], weight[D * K], y[B * D * T];
static const int64_t shape[] = {B, D, T}, weight_shape[] = {D, K};

static cot_causal_conv1d_forward_args legal(void)
{
    cot_causal_conv1d_forward_args a;
    COT_INIT(&a);
    a.x = cot_tensor_contiguous(x, COT_F32, 3, shape);
    a.weight = cot_tensor_contiguous(weight, COT_F32, 2, weight_shape);
    a.y = cot_tensor_contiguous(y, COT_F32, 3, shape);
    return a;
}

static cot_status forward_with(const char *kernels, const cot_causal_conv1d_forward_args *a)
{
    cot_queue *queue = make_queue(kernels, 0);
    const cot_status status = cot_causal_conv1d_forward(queue, a);
    cot_queue_destroy(queue);
    return status;
}

/* A valid call with one fault. */
#define WRONG(status, change)                            \
    do {                                                 \
        cot_causal_conv1d_forward_args a = legal();      \
        change;                                          \
        assert_documented(status, forward_with("", &a)); \
    } while (0)

static void refused_arguments(void **state)
{
    (void)state;
    static int32_t indices[B * T];
    static const int64_t two[] = {B, T}, three = 3;
    static int32_t descending[] = {0, 3, 1}, beyond[] = {0, 3, 9};
    const cot_causal_conv1d_forward_args unspoilt = legal();
    assert_ok(forward_with("", &unspoilt));
    WRONG(COT_INVALID_ARGUMENT, memset(&a.weight, 0, sizeof a.weight));
    WRONG(COT_INVALID_ARGUMENT, a.activation = (cot_activation)7);
    WRONG(COT_INVALID_ARGUMENT, a.seq_idx = cot_tensor_contiguous(indices, COT_I32, 2, two);
          a.cu_seqlens = cot_tensor_contiguous(descending, COT_I32, 1, &three));
    WRONG(COT_INVALID_ARGUMENT, a.struct_size = 0);
    WRONG(COT_INVALID_SHAPE, a.y.shape[2] = T - 1);
    WRONG(COT_INVALID_SHAPE, a.x.rank = 2);
    WRONG(COT_INVALID_SHAPE, a.x.stride[2] = (int64_t)1 << 56);
    WRONG(COT_INVALID_DTYPE, a.x.dtype = COT_I32);
    WRONG(COT_INVALID_DTYPE, a.weight.dtype = COT_F64);
    WRONG(COT_INVALID_LAYOUT, a.y.data = x);
    WRONG(COT_INVALID_LAYOUT, a.y.stride[2] = 0);
    WRONG(COT_INVALID_DATA, a.cu_seqlens = cot_tensor_contiguous(descending, COT_I32, 1, &three));
    WRONG(COT_INVALID_DATA, a.cu_seqlens = cot_tensor_contiguous(beyond, COT_I32, 1, &three));
}

static void no_kernel(void **state)
{
    (void)state;
    const cot_causal_conv1d_forward_args a = legal();
    assert_documented(COT_UNSUPPORTED, forward_with("causal_conv1d=causal_conv1d_fwd_scalar_f64", &a));
}

static void *allocate_nothing(void *context, size_t bytes)
{
    (void)context, (void)bytes;
    return NULL;
}

static void memory(void **state)
{
    (void)state;
    static float dweight[D * K];
    _Alignas(64) static char workspace[64];
    cot_queue *queue = make_queue("causal_conv1d=causal_conv1d_bwd_scalar", 0);
    cot_causal_conv1d_backward_args a;
    COT_INIT(&a);
    a.x = cot_tensor_contiguous(x, COT_F32, 3, shape);
    a.weight = cot_tensor_contiguous(weight, COT_F32, 2, weight_shape);
    a.dy = cot_tensor_contiguous(y, COT_F32, 3, shape);
    a.dweight = cot_tensor_contiguous(dweight, COT_F32, 2, weight_shape);
    a.workspace = workspace;
    a.workspace_bytes = sizeof workspace;
    assert_documented(COT_WORKSPACE_TOO_SMALL, cot_causal_conv1d_backward(queue, &a));
    assert_documented(COT_OUT_OF_MEMORY, cot_queue_reserve(queue, SIZE_MAX / 2));
    a.workspace = NULL;
    a.workspace_bytes = 0;
    assert_ok(cot_queue_set_allocator(queue, allocate_nothing, NULL));
    assert_documented(COT_OUT_OF_MEMORY, cot_causal_conv1d_backward(queue, &a));
    cot_queue_destroy(queue);
}

/* Runs last: checks that every message of the page was produced. COT_WOULD_ALLOCATE, COT_NO_DEVICE and
 * COT_DEVICE_ERROR depend on the machine, COT_PEER_ERROR is another library's: they have no message on the page. */
static void every_message_was_provoked(void **state)
{
    (void)state;
    assert_true(message_count > 0);
    for (size_t i = 0; i < message_count; i++)
        if (!messages[i].produced)
            fail_msg("docs/guide/errors_c.md: nothing gives the message: %s", messages[i].text);
    for (size_t s = COT_INVALID_ARGUMENT; s < section_count; s++)
        if (sections[s].messages == 0 && s != COT_WOULD_ALLOCATE && s != COT_NO_DEVICE && s != COT_DEVICE_ERROR &&
            s != COT_PEER_ERROR)
            fail_msg("docs/guide/errors_c.md: %s has no example", sections[s].name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_status_has_a_section),
        cmocka_unit_test(refused_arguments),
        cmocka_unit_test(no_kernel),
        cmocka_unit_test(memory),
        cmocka_unit_test(every_message_was_provoked),
    };
    return cmocka_run_group_tests(tests, read_page, NULL);
}
