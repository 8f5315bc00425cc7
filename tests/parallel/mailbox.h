/* SPDX-License-Identifier: Apache-2.0
 * mailbox.h: groups of cot_group_create_custom whose ranks are threads. As in MPI, a send copies small data at once. Of
 * larger data the receiver makes the copy, in one of its waits. */
#ifndef COT_TESTS_MAILBOX_H
#define COT_TESTS_MAILBOX_H

#include <cotangent/parallel.h>

/* Makes the transfer with this number fail on the rank, counted from the creation on; 0: none. */
typedef struct mailbox_fault {
    int rank;
    int start, wait;
} mailbox_fault;

/* Creates the handles of all ranks. statuses: what each rank got. Returns the first error. */
cot_status mailbox_groups(int ranks, const cot_group_options *options, const mailbox_fault *fault, cot_group **groups,
                          cot_status *statuses);

/* The number of contexts that cot_group_destroy has not destroyed, of all groups. */
int mailbox_contexts(void);

#endif
