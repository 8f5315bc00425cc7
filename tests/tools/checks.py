# SPDX-License-Identifier: Apache-2.0
"""Counts the checks of a test."""
passed = failed = 0


def check(good, what):
    """what: the check, as printed if it fails."""
    global passed, failed
    if good:
        passed += 1
    else:
        failed += 1
        print(f'FAILED: {what}')
