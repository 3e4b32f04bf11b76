# SPDX-License-Identifier: Apache-2.0
"""What every process of a Dynamo on this machine has in its environment."""

from __future__ import annotations

from pathlib import Path

__all__ = ["environment"]


def environment(discovery: Path) -> dict[str, str]:
    """Return the variables of a Dynamo whose processes find each other through a folder and listen on loopback."""
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(discovery),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
