"""Oracle of the page tables: which host rows belong to which seat.

Knows pages, reference counts, the kept (cached) pages and lengths. Knows nothing of slots, layers or bytes:
an operation returns the host rows that must lose their slots or be copied, and the caller does it.

Every operation either does all of its work or raises ValueError and changes nothing.
"""

from collections.abc import Sequence

import numpy as np

from tests.oracles.words import NO_PAGE, PAGE


class OracleTables:
    """Page tables of `seats` requests of at most `capacity` positions over `pages` host pages of 64 rows.

    page_table: i32[B, P // 64]  the page of each run of 64 positions, or NO_PAGE
    page_count: i32[pages]  how many seats refer to the page
    page_cached: bool[pages]  kept although no seat refers to it
    lengths: i32[B]  positions already written
    active: bool[B]  the seat holds a request

    A page is owned (count > 0), cached, or free (count 0 and not cached); an owned page is never marked
    cached.
    """

    def __init__(self, seats: int, capacity: int, pages: int):
        if capacity % PAGE:
            raise ValueError(f"capacity {capacity} is no multiple of the page of {PAGE} rows; round it up")
        self.capacity = capacity
        self.page_table = np.full((seats, capacity // PAGE), NO_PAGE, np.int32)
        self.page_count = np.zeros(pages, np.int32)
        self.page_cached = np.zeros(pages, bool)
        self.lengths = np.zeros(seats, np.int32)
        self.active = np.zeros(seats, bool)

    # Questions.

    def free_pages(self) -> list[int]:
        """Pages that nobody refers to and nobody keeps, ascending."""
        free = []
        for page in range(len(self.page_count)):
            if self.page_count[page] == 0 and not self.page_cached[page]:
                free.append(page)
        return free

    def pages_of(self, seat: int) -> list[int]:
        """The seat's reserved pages, in order of position."""
        pages = []
        for page in self.page_table[seat]:
            if page != NO_PAGE:
                pages.append(int(page))
        return pages

    def row_of(self, seat: int, position: int) -> int:
        """The host row of a reserved position, written or not."""
        page = int(self.page_table[seat, position // PAGE])
        if page == NO_PAGE:
            raise ValueError(f"position {position} of seat {seat} has no page; admit it with a larger capacity")
        return page * PAGE + position % PAGE

    def rows_of(self, seat: int) -> list[int]:
        """The host rows of the seat's written positions, in order of position."""
        return [self.row_of(seat, position) for position in range(int(self.lengths[seat]))]

    # Operations.

    def admit(self, seat: int, capacity_tokens: int, shared_pages: Sequence[int] = ()) -> list[int]:
        """Give a free seat ceil(capacity_tokens / 64) pages: the shared ones first, then the lowest free ids.

        A shared page is full and owned or cached; its count rises by one and a cached page becomes owned. Its
        positions count as written: the length afterwards is 64 * len(shared_pages). At least one page is the
        seat's own, because the last prompt token is always recomputed. Returns the seat's pages in order of
        position.
        """
        self._require_free_seat(seat)
        total = self._pages_for(capacity_tokens)
        shared = [int(page) for page in shared_pages]
        if len(set(shared)) != len(shared):
            raise ValueError(f"shared pages {shared} name a page twice; a seat holds a page once")
        if len(shared) >= total:
            raise ValueError(
                f"{len(shared)} shared pages leave none of the {total} pages of {capacity_tokens} tokens "
                "for the seat's own last token; share fewer"
            )
        for page in shared:
            if self.page_count[page] == 0 and not self.page_cached[page]:
                raise ValueError(f"page {page} is free and has nothing to share; share an owned or a cached page")
            for owner, index in self._owners(page):
                written = int(self.lengths[owner]) - index * PAGE
                if written < PAGE:
                    raise ValueError(
                        f"page {page} of seat {owner} holds {max(0, written)} of {PAGE} rows; "
                        "only full pages are shared"
                    )
        own = self._lowest_free(total - len(shared))
        self._seat_with(seat, shared, own, length=len(shared) * PAGE)
        return shared + own

    def fork(self, parent: int, child: int, capacity_tokens: int) -> list[tuple[int, int]]:
        """Make the free seat `child` a continuation of `parent`.

        The child shares the parent's full pages and gets own pages for the rest of its capacity. Returns the
        copies (source row, target row) that give it the parent's partial page, in order of position; none
        when the length is a multiple of 64. In every layer the host records and the index keys of these rows
        are to be copied; slots are not.
        """
        if not self.active[parent]:
            raise ValueError(f"seat {parent} holds no request to fork; admit one first")
        self._require_free_seat(child)
        length = int(self.lengths[parent])
        if capacity_tokens < length:
            raise ValueError(f"capacity {capacity_tokens} is below the parent's {length} positions; raise it")
        total = self._pages_for(capacity_tokens)
        full = length // PAGE
        own = self._lowest_free(total - full)
        self._seat_with(child, self.pages_of(parent)[:full], own, length=length)
        copies = []
        for position in range(full * PAGE, length):
            copies.append((self.row_of(parent, position), self.row_of(child, position)))
        return copies

    def release(self, seat: int, keep_pages: bool = False) -> list[int]:
        """Empty the seat. Returns, ascending, all 64 rows of every page whose count reached 0.

        Such a page becomes free, or cached when `keep_pages` is set and the page is full (all of it
        below the length). Its rows are returned in both cases: a row with count 0 has no slot.
        """
        if not self.active[seat]:
            raise ValueError(f"seat {seat} holds no request to release")
        full = int(self.lengths[seat]) // PAGE
        rows = []
        for index, page in enumerate(self.pages_of(seat)):
            self.page_count[page] -= 1
            if self.page_count[page] == 0:
                self.page_cached[page] = keep_pages and index < full
                rows.extend(range(page * PAGE, (page + 1) * PAGE))
        self.page_table[seat] = NO_PAGE
        self.lengths[seat] = 0
        self.active[seat] = False
        return sorted(rows)

    def uncache(self, pages: Sequence[int]) -> None:
        """Cached pages become free. Their rows lost their slots when the pages were released."""
        for page in pages:
            if not self.page_cached[page]:
                raise ValueError(f"page {page} is not cached; only a cached page can be dropped")
        for page in pages:
            self.page_cached[page] = False

    def append(self, seat: int, count: int) -> list[int]:
        """Write the next `count` positions. Returns their host rows in order of position."""
        if not self.active[seat]:
            raise ValueError(f"seat {seat} holds no request to append to")
        length = int(self.lengths[seat])
        reserved = len(self.pages_of(seat)) * PAGE
        if length + count > reserved:
            raise ValueError(
                f"seat {seat} holds {length} positions and {count} more pass its reserved {reserved}; "
                "admit it with a larger capacity"
            )
        self.lengths[seat] = length + count
        return [self.row_of(seat, position) for position in range(length, length + count)]

    def rollback(self, seat: int, new_length: int) -> list[int]:
        """Forget the positions from `new_length` on. Returns their host rows in order of position.

        The pages stay reserved. A position in a page that another seat refers to cannot be forgotten.
        """
        if not self.active[seat]:
            raise ValueError(f"seat {seat} holds no request to roll back")
        length = int(self.lengths[seat])
        if not 0 <= new_length <= length:
            raise ValueError(
                f"seat {seat} holds {length} positions; a rollback to {new_length} must lie in 0..{length}"
            )
        for position in range(new_length, length):
            page = int(self.page_table[seat, position // PAGE])
            if self.page_count[page] > 1:
                raise ValueError(
                    f"a rollback of seat {seat} to {new_length} drops rows of page {page}, which "
                    f"{self.page_count[page]} seats share; roll back to {(position // PAGE + 1) * PAGE} or "
                    "later, or release a sharer"
                )
        rows = [self.row_of(seat, position) for position in range(new_length, length)]
        self.lengths[seat] = new_length
        return rows

    # What must always hold.

    def check(self) -> None:
        """Assert that owned + cached + free = all, each page in one of them, and that the arrays agree."""
        owned, cached, free = 0, 0, 0
        for page in range(len(self.page_count)):
            owners = self._owners(page)
            assert self.page_count[page] == len(owners), f"page {page}: count {self.page_count[page]}, owners {owners}"
            assert not (self.page_count[page] > 0 and self.page_cached[page]), f"page {page} is owned and cached"
            owned += self.page_count[page] > 0
            cached += bool(self.page_cached[page])
            free += page in self.free_pages()
            if len(owners) > 1:
                for seat, index in owners:
                    assert self.lengths[seat] >= (index + 1) * PAGE, f"shared page {page} is not full in seat {seat}"
        assert owned + cached + free == len(self.page_count), f"{owned} + {cached} + {free} of {len(self.page_count)}"
        for seat in range(len(self.active)):
            pages = self.pages_of(seat)
            assert list(self.page_table[seat, : len(pages)]) == pages, f"seat {seat} has a gap in its pages"
            assert len(set(pages)) == len(pages), f"seat {seat} holds a page twice"
            assert 0 <= self.lengths[seat] <= len(pages) * PAGE, f"seat {seat} is longer than its pages"
            assert bool(self.active[seat]) == (len(pages) > 0), f"seat {seat}: active without pages, or the reverse"

    # Helpers.

    def _owners(self, page: int) -> list[tuple[int, int]]:
        """(seat, index in its table) of every reference to the page."""
        owners = []
        for seat in range(self.page_table.shape[0]):
            for index in range(self.page_table.shape[1]):
                if self.page_table[seat, index] == page:
                    owners.append((seat, index))
        return owners

    def _require_free_seat(self, seat: int) -> None:
        if self.active[seat]:
            raise ValueError(f"seat {seat} already holds a request; release it first")

    def _pages_for(self, capacity_tokens: int) -> int:
        if not 0 < capacity_tokens <= self.capacity:
            raise ValueError(f"{capacity_tokens} tokens must lie in 1..{self.capacity}, the capacity of a seat")
        return -(-capacity_tokens // PAGE)

    def _lowest_free(self, count: int) -> list[int]:
        free = self.free_pages()
        if count > len(free):
            raise ValueError(
                f"{count} pages are needed but {len(free)} are free ({int(self.page_cached.sum())} cached); "
                "release a seat or drop cached pages"
            )
        return free[:count]

    def _seat_with(self, seat: int, shared: list[int], own: list[int], length: int) -> None:
        for index, page in enumerate(shared + own):
            self.page_table[seat, index] = page
            self.page_count[page] += 1
            self.page_cached[page] = False
        self.lengths[seat] = length
        self.active[seat] = True
