# SPDX-License-Identifier: Apache-2.0
"""One file per op: its schemas, the allocation of results, and the public functions."""
