"""The listening socket of `posttrain serve`."""

import asyncio
import socket

from posttrain.serve.config import ServeConfig
from posttrain.serve.server import _bind, _port


def test_answers_are_not_held_back_until_their_headers_are_acknowledged(tmp_path):
    """Found by a push of one tensor that took 144 ms: 48 for each of its three requests."""

    async def accepted():
        found = asyncio.get_running_loop().create_future()
        bound = _bind(ServeConfig(model=str(tmp_path), port=0))
        server = await asyncio.start_server(lambda _, writer: found.set_result(writer), sock=bound)
        async with server:
            _, client = await asyncio.open_connection("127.0.0.1", _port(bound))
            writer = await found
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            client.close()
            return option

    assert asyncio.run(accepted()) != 0
