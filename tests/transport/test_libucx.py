"""What is known of UCX's own files; it needs no UCX."""

from __future__ import annotations

import contextlib
import select
import socket

from rollwire_transport._links.libucx import _sockets


def test_sockets_are_found_through_others_and_may_go_meanwhile() -> None:
    with contextlib.ExitStack() as stack:
        outer, inner = stack.enter_context(select.epoll()), stack.enter_context(select.epoll())
        pairs = [socket.socketpair() for _ in range(3)]
        for one, other in pairs:
            stack.callback(one.close)
            stack.callback(other.close)
        outer.register(pairs[0][0])
        outer.register(inner)
        for one, _ in pairs[1:]:
            inner.register(one)
        assert set(_sockets(outer.fileno())) == {one.fileno() for one, _ in pairs}

        going = _sockets(inner.fileno())
        files = {one.fileno(): one for one, _ in pairs[1:]}
        first = next(going)
        del files[first]
        (other,) = files.values()
        other.close()
        assert list(going) == []

        going = _sockets(outer.fileno())
        inner.close()
        assert list(going) == [pairs[0][0].fileno()]
