# SPDX-License-Identifier: Apache-2.0
"""The least that can stand between client and frontend with the same library: bytes in, bytes out, nothing decided.

python gateway_relay.py PORT BACKEND
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def main(port: int, backend: str) -> None:
    """Serve until ended."""
    connector = aiohttp.TCPConnector(limit=0)
    client = aiohttp.ClientSession(backend, connector=connector, auto_decompress=False)

    async def relay(request: web.BaseRequest) -> web.StreamResponse:
        sent = await request.read()
        kind = {"content-type": "application/json"}
        async with client.request(request.method, request.path, data=sent, headers=kind) as got:
            headers = {"content-type": got.headers["content-type"]}
            if got.content_length is not None:
                return web.Response(status=got.status, body=await got.read(), headers=headers)
            answer = web.StreamResponse(status=got.status, headers=headers)
            await answer.prepare(request)
            async for piece in got.content.iter_any():
                await answer.write(piece)
            return answer

    server = web.Server(relay, access_log=None)
    await asyncio.get_running_loop().create_server(server, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
