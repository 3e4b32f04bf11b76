# SPDX-License-Identifier: Apache-2.0
"""`vllm/mooncake-store-cpu-event`: needs vLLM's CPU build; no store.

The store worker's own `wait_for_save` is handed one request with a block to save, and what reaches the sending thread
is looked at. That saved blocks come back is shown on the real stack (`tests/stack/test_second_tier.py`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

PATCH = "vllm/mooncake-store-cpu-event"

SAVE = """
import json
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

worker = object.__new__(MooncakeStoreWorker)  # its constructor wants a master
sent = []
worker._capacity_only, worker.can_put = False, True
worker.kv_send_thread = SimpleNamespace(add_request=sent.append)
metadata = MooncakeStoreConnectorMetadata(set(), set())
for name, can_save in (("kept", False), ("saved", True), ("saved too", True)):
    metadata.add_request(
        ReqMeta(req_id=name, token_len_chunk=32, block_ids=([1],), block_hashes=[b"h"], can_save=can_save)
    )
worker.wait_for_save(metadata)
print(json.dumps([[request.req_id, request.current_event] for request in sent]))
"""

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def test_published_worker_dies_at_the_first_save(python: Python, published: str) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = python(published + SAVE)
    assert done.returncode == 1
    assert "dummy base class Event" in done.stderr, done.stderr


@pytest.mark.installed
def test_installed_worker_hands_every_save_on_without_an_event(python: Python) -> None:
    done = python(SAVE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["saved", None], ["saved too", None]]
