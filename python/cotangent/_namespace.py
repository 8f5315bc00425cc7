# SPDX-License-Identifier: Apache-2.0
"""The name of the ops in torch.ops. tools/make_kernels_layout.py writes another name into its copies of the package,
because a process may load several copies, and torch refuses to define an op twice."""
NAMESPACE = "cotangent"
