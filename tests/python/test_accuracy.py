# SPDX-License-Identifier: Apache-2.0
"""The errors that docs/guide/accuracy.md shows, by tools/peers/accuracy.py: close to those of rounding the exact result, or of
PyTorch."""
import sys
from pathlib import Path

PEERS = str(Path(__file__).parents[2] / "tools" / "peers")
sys.path.insert(0, PEERS)
import accuracy

sys.path.remove(PEERS)  # it has a causal_conv1d.py, which other tests would import


def test_errors(device):
    rows = accuracy.measure(device.type, "", "")
    assert {row["of"] for row in rows} == {
        "attention", "causal_conv1d", "causal_conv1d_dense", "dropout", "mhc_pre", "mhc_post", "mhc_sinkhorn"}  # fmt: skip
    for row in rows:
        assert row["error"] <= max(1.2 * row["rounding"], 1.5 * row["peer_error"]) + 5e-7, row
