# Lets doxygen read the plain comments of the public headers: a comment that begins a line belongs to what follows, one
# after code to what stands before it. Members that are the same in every argument struct are explained here.
1s:^/\* SPDX-License-Identifier.*:/** @file:
s:^/\* ---- .* ----* \*/$::
s:^\( *\)/\* :\1/** :
s|^ *size_t struct_size;$|& /* sizeof the struct: COT_INIT sets it */|
s|^ *void \*workspace;$|& /* NULL = the queue's pool; else 64-byte aligned, workspace_bytes of it */|
s:^ *size_t workspace_bytes;$:& /* of workspace; 0 where that is NULL */:
s:\([^ ]\) *\/\* :\1 /**< :
