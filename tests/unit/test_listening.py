"""Where the server listens is tried before Serve starts, and what cannot be had is told in one line."""

import socket

import pytest

from ray_eagle.config import ServeConfig
from ray_eagle.errors import ServingError
from ray_eagle.serving.app import _start_http, last_line
from ray_eagle.serving.listening import bindable

REMOTE = (
    '\x1b[36mray::ProxyActor.ready()\x1b[39m (pid=25335, ip=192.0.2.2)\n  File "proxy.py", line 1810, in ready\n'
    "    raise e from None\nRuntimeError: \x1b[31mFailed to bind to address '127.0.0.1:8000'.\x1b[39m\n"
)


def test_a_port_in_use_is_told_before_serve_starts(cluster: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ServingError) as raised:
            _start_http(ServeConfig(port=port))
    assert str(raised.value) == (
        f"server: cannot listen on 127.0.0.1:{port} (Address already in use). Set serve.port to a free one, or 0."
    )
    assert bindable("127.0.0.1", port) == port
    assert bindable("127.0.0.1", 0) > 0


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid"])
def test_a_host_of_another_machine_is_told_as_such(host: str) -> None:
    with pytest.raises(
        ServingError, match=rf"^server: cannot listen on {host}:0 \([A-Z][\w ]+\)\. Set serve.host to an"
    ) as found:
        bindable(host, 0)
    assert "serve.port" not in str(found.value)


def test_of_a_remote_traceback_the_last_line_is_told() -> None:
    assert last_line(REMOTE) == "RuntimeError: Failed to bind to address '127.0.0.1:8000'."
    assert last_line("timed out") == "timed out" and last_line(" ") == "no reason"
