/* SPDX-License-Identifier: Apache-2.0
 * streams.h: operations of streams that wait in queues, so that a missing dependence between two streams, or between a
 * stream and the host, gives wrong results. EMU_STREAMS=N switches them on; else every operation is executed at once.
 *
 * With EMU_STREAMS=N, an operation is executed when something needs it: the host waits for its stream or for an event
 * after it, or another stream reaches an operation that waits for such an event. N is the seed of a generator that also
 * executes operations of any stream early, each time when one is enqueued; with N = 0 none is early. */
#ifndef COT_EMULATOR_STREAMS_H
#define COT_EMULATOR_STREAMS_H

#include <cuda.h>
#include <stdbool.h>

/* Executes an operation with its parameters, or frees the parameters only. */
typedef CUresult stream_function(void *parameters, bool execute);

bool streams_are_late(void);

/* Executes the operation now, or adds it to the stream's queue. The queue owns the parameters. The caller holds the mutex
 * of the driver, here and below. */
CUresult streams_enqueue(CUstream stream, stream_function *function, void *parameters);

/* Executes everything of a stream, or of all streams. The first error of an operation is returned again by every call. */
CUresult streams_finish(CUstream stream);
CUresult streams_finish_all(void);

/* An event. */
typedef struct stream_record stream_record;
stream_record *streams_record(CUstream stream);
void streams_forget(stream_record *record);
CUresult streams_await(CUstream stream, stream_record *record);
CUresult streams_finish_record(stream_record *record);
/* Executes one operation of its stream, and returns whether the event has happened. */
bool streams_poll(stream_record *record);

#endif
