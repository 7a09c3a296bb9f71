"""Assigns requests to replicas: plain data, without processes.

Requests that arrive together are cut into one stretch per replica, in the given order, so that neighbours with a common
prefix share a replica's prefix cache. A replica is sent the requests that it can run and a few more; when its stretch
is empty, it gets the far half of the longest. A request that comes alone goes to the replica that had its first block,
unless that one has over twice the least load.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from xxhash import xxh3_64_intdigest

from nanovllm.engine.request import Request

_MOST_BLOCKS = 2**16
"""Number of first blocks to remember; the least recently used is forgotten first."""
_AHEAD_SHARE, _LEAST_AHEAD = 8, 4
"""Requests that a replica has beyond its capacity, to bridge the time until the next ones come: capacity divided by
the first, at least the second.
"""


@dataclass(eq=False)
class Share:
    """The work of one replica, which runs `capacity` sequences at once.

    `stretch` has its future requests, in order, and `sent` its unfinished ones, of `num_sent` sequences.
    """

    capacity: int
    stretch: deque[int] = field(default_factory=deque)
    sent: dict[int, None] = field(default_factory=dict)
    num_sent: int = 0

    @property
    def room(self) -> int:
        """Number of sequences that it can be sent."""
        return self.capacity + max(_LEAST_AHEAD, self.capacity // _AHEAD_SHARE) - self.num_sent

    @property
    def load(self) -> int:
        """Number of requests that it has and will get."""
        return len(self.sent) + len(self.stretch)


class Placement:
    """Distributes `requests`, all unfinished ones by id, among replicas; `shares` are of the live ones, by index."""

    def __init__(self, capacities: Sequence[int], block_size: int) -> None:
        self.shares = {index: Share(capacity) for index, capacity in enumerate(capacities)}
        self.requests: dict[int, Request] = {}
        self._block_size = block_size
        # The replica that computed each first block.
        self._owners: OrderedDict[int, int] = OrderedDict()

    def route(self, request_id: int, request: Request) -> int:
        """Return the replica for a request that comes alone, to be sent at once."""
        self.requests[request_id] = request
        index = self._replica_of(request)
        self._send(index, request_id)
        return index

    def spread(self, requests: dict[int, Request]) -> None:
        """Add requests that arrive together; lower priorities are at the front of every replica's stretch."""
        self.requests.update(requests)
        shares, are_new = list(self.shares.values()), not any(share.stretch for share in self.shares.values())
        for _, group in groupby(requests, lambda request_id: requests[request_id].priority):
            ids = list(group)
            for i, share in enumerate(shares):
                # Later requests are at the end of the order, and so is the last stretch.
                part = ids[i * len(ids) // len(shares) : (i + 1) * len(ids) // len(shares)]
                (share if are_new else shares[-1]).stretch.extend(part)

    def take(self) -> Iterator[tuple[int, int]]:
        """Yield the requests to send next, by id, each with its replica."""
        for index, share in self.shares.items():
            yield from self._take(index, share)
        # Requests left over, whose replicas have enough.
        for index, share in self.shares.items():
            while share.room > 0 and self._steal(share):
                yield from self._take(index, share)

    def holder(self, request_id: int) -> int | None:
        """Return the replica that has a request; None if it was not sent."""
        return next((index for index, share in self.shares.items() if request_id in share.sent), None)

    def send_now(self, request_id: int) -> int:
        """Return the replica for a request that was not sent yet, to be sent at once."""
        index = min(self.shares, key=lambda index: self.shares[index].load)
        self._send(index, request_id)
        return index

    def end(self, request_id: int) -> Request:
        """Forget a finished request, and return it."""
        request = self.requests.pop(request_id)
        if (holder := self.holder(request_id)) is not None:
            share = self.shares[holder]
            del share.sent[request_id]
            share.num_sent -= request.params.n
        return request

    def lose(self, index: int) -> list[int]:
        """Give a dead replica's work to another one, from whose stretch all can take; return the ids that run again."""
        lost = self.shares.pop(index)
        if self.shares:
            heir = min(self.shares.values(), key=lambda share: share.load)
            heir.stretch.extendleft(reversed(lost.sent))
            heir.stretch.extend(lost.stretch)
        return list(lost.sent)

    def _take(self, index: int, share: Share) -> Iterator[tuple[int, int]]:
        while share.room > 0 and share.stretch:
            request_id = share.stretch.popleft()
            # It may have been dropped, or sent, meanwhile.
            if request_id in self.requests and self.holder(request_id) is None:
                self._send(index, request_id)
                yield request_id, index

    def _send(self, index: int, request_id: int) -> None:
        share = self.shares[index]
        share.sent[request_id] = None
        share.num_sent += self.requests[request_id].params.n

    def _steal(self, thief: Share) -> bool:
        """Move the far half of the longest stretch; return whether there was anything to move."""
        longest = max(self.shares.values(), key=lambda share: len(share.stretch))
        count = (len(longest.stretch) + 1) // 2
        thief.stretch.extendleft([longest.stretch.pop() for _ in range(count)])
        return count > 0

    def _replica_of(self, request: Request) -> int:
        tokens = request.token_ids[: self._block_size]
        key = xxh3_64_intdigest(tokens.tobytes() + (request.cache_salt or "").encode())
        indices = list(self.shares)
        # Several front ends, which do not know of each other's requests, begin with the same replica.
        first = key % len(indices)
        least = min(indices[first:] + indices[:first], key=lambda index: self.shares[index].load)
        if len(tokens) < self._block_size:
            # It has no full block.
            return least
        owner = self._owners.pop(key, least)
        if owner not in self.shares or self.shares[owner].load > 2 * max(1, self.shares[least].load):
            owner = least
        self._owners[key] = owner
        if len(self._owners) > _MOST_BLOCKS:
            self._owners.popitem(last=False)
        return owner
