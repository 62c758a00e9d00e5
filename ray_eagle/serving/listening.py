"""Where the server is to listen: tried before anything starts, since Serve takes seconds to fail, and told in one line."""

import errno
import socket

from ray_eagle.errors import ServingError

FREE_PORT = "Set serve.port to a free one, or 0."
OWN_HOST = "Set serve.host to an address of the machine of Ray's head: 127.0.0.1, or 0.0.0.0 for all that it has."


def bindable(host: str, port: int) -> int:
    """The port, or with 0 a free one, after this machine could bind it. Raises ServingError."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        fix = FREE_PORT if error.errno in (errno.EADDRINUSE, errno.EACCES) else OWN_HOST
        raise cannot_listen(host, port, why, fix) from error


def cannot_listen(host: str, port: int, why: str, fix: str) -> ServingError:
    return ServingError(f"server: cannot listen on {host}:{port} ({why.rstrip('.')}). {fix}")
