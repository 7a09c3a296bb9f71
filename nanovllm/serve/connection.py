"""HTTP connections that cannot be held open by doing nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.serve.settings import ServeSettings


def timed_protocol(settings: ServeSettings, count_error: Callable[[str], None]) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with time limits that it has not.

    A connection is aborted if the head of a request takes longer than `max_read_seconds`, or if nothing can be
    sent for `max_write_seconds`, because the client does not read, which `count_error` is told as "slow_client".
    """

    class TimedProtocol(HttpToolsProtocol):
        _reading: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._reading = self.loop.call_later(settings.max_read_seconds, transport.abort)

        def on_message_begin(self) -> None:
            # Of a further request on this connection.
            if self._reading is None:
                self._reading = self.loop.call_later(settings.max_read_seconds, self.transport.abort)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop_timer("_reading")
            super().on_headers_complete()

        def pause_writing(self) -> None:
            self._watch_writing()
            super().pause_writing()

        def resume_writing(self) -> None:
            self._stop_timer("_writing")
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer("_reading")
            self._stop_timer("_writing")
            super().connection_lost(exc)

        def _watch_writing(self) -> None:
            unsent = self.transport.get_write_buffer_size()
            self._writing = self.loop.call_later(settings.max_write_seconds, self._end_unless_written, unsent)

        def _end_unless_written(self, unsent: int) -> None:
            # Writing goes on only when nearly all is sent, which takes a large answer long.
            if self.transport.get_write_buffer_size() < unsent:
                self._watch_writing()
            else:
                count_error("slow_client")
                self.transport.abort()

        def _stop_timer(self, name: str) -> None:
            timer = getattr(self, name)
            setattr(self, name, None)
            if timer is not None:
                timer.cancel()

    return TimedProtocol
