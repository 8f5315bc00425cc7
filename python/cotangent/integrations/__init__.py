# SPDX-License-Identifier: Apache-2.0
"""Functions that switch cotangent on inside other packages. Each module needs its package only when it is called."""
