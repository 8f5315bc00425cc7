# SPDX-License-Identifier: Apache-2.0
"""One file an op: its schemas, what they allocate, and the functions that users call."""
