# SPDX-License-Identifier: Apache-2.0
"""Runs a program with a limit on the size of its files, for test_run.py and test_resume.py."""
import os
import resource
import subprocess


def run(command, env, limit=None):
    def set_limit():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=set_limit,
                          env=env) as process:
        out, err = process.communicate()
    # With the limit, clang's OpenMP runtime leaves an empty file. A later process with the same id would end by SIGBUS.
    left = f'/dev/shm/__KMP_REGISTERED_LIB_{process.pid}_{os.getuid()}'
    if limit is not None and os.path.exists(left):
        os.remove(left)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
