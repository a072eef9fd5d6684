# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`pointsman.state.key_table.KeyTable` compiled: the same answers, in a twentieth of the time.

Keys are hashed by multiplication with a random odd number, since others may choose them. The highest bits of the product
choose one of PARTS open-addressing arrays, the next ones the slot in it; entries of 16 bytes follow one after the other
(linear probing). A part is rebuilt alone, so no insertion takes long. Entries of one key keep their order."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

import sys
from os import urandom

if sys.byteorder != "little":
    raise ImportError("packed keys are little-endian")

VERSION = 1

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define prefetch(address) __builtin_prefetch(address)
    #else
    #define prefetch(address)
    #endif
    """
    void prefetch(const void*) noexcept

cdef enum:
    PART_BITS = 12
    PARTS = 4096
    SLOTS_MIN = 8

cdef uint64_t FREE = 0xFFFFFFFFFFFFFFFF
cdef uint64_t FACTOR = int.from_bytes(urandom(8), "little") | 1

cdef struct Entry:
    uint64_t key
    uint64_t place

cdef struct Part:
    Entry* entries
    uint32_t size
    uint32_t used


cdef inline uint32_t _home(uint64_t hashed, uint32_t size) noexcept:
    return <uint32_t>((((hashed << PART_BITS) >> 32) * size) >> 32)


cdef inline uint32_t _next(uint32_t slot, uint32_t size) noexcept:
    return slot + 1 if slot + 1 < size else 0


cdef inline Part* _part(Part* parts, uint64_t hashed) noexcept:
    return &parts[hashed >> (64 - PART_BITS)]


cdef void _put(Entry* entries, uint32_t size, uint64_t key, uint64_t place) noexcept:
    cdef uint32_t slot = _home(key * FACTOR, size)
    while entries[slot].place != FREE:
        slot = _next(slot, size)
    entries[slot].key, entries[slot].place = key, place


cdef int _resize(Part* part, uint32_t size) except -1:
    cdef Entry* entries = <Entry*>PyMem_Malloc(size * sizeof(Entry))
    cdef uint32_t first, slot
    if entries == NULL:
        raise MemoryError
    memset(entries, 0xFF, size * sizeof(Entry))
    if part.size:
        slot = first = _beginning(part)
        while True:
            if part.entries[slot].place != FREE:
                _put(entries, size, part.entries[slot].key, part.entries[slot].place)
            slot = _next(slot, part.size)
            if slot == first:
                break
        PyMem_Free(part.entries)
    part.entries, part.size = entries, size
    return 0


cdef uint32_t _beginning(Part* part) noexcept:
    """A free slot: a sequence may go on at the first one. Entries from there on are in the order in which they were put."""
    cdef uint32_t slot = 0
    while part.entries[slot].place != FREE:
        slot += 1
    return slot


def _restored(const unsigned char[::1] entries):
    cdef KeyTable table = KeyTable()
    cdef Py_ssize_t at
    cdef const Entry* entry
    for at in range(entries.shape[0] // <Py_ssize_t>sizeof(Entry)):
        entry = <const Entry*>&entries[at * <Py_ssize_t>sizeof(Entry)]
        table._insert(entry.key, entry.place)
    return table


cdef class KeyTable:
    cdef Part* _parts
    cdef size_t _entries

    def __cinit__(self):
        self._parts = <Part*>PyMem_Calloc(PARTS, sizeof(Part))
        if self._parts == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef int part
        if self._parts != NULL:
            for part in range(PARTS):
                PyMem_Free(self._parts[part].entries)
            PyMem_Free(self._parts)

    def __len__(self):
        return self._entries

    def __reduce__(self):
        cdef bytes entries = PyBytes_FromStringAndSize(NULL, self._entries * sizeof(Entry))
        cdef Entry* written = <Entry*>PyBytes_AS_STRING(entries)
        cdef int number
        cdef Part* part
        cdef uint32_t slot, left
        for number in range(PARTS):
            part = &self._parts[number]
            if part.used:
                slot, left = _beginning(part), part.used
                while left:
                    slot = _next(slot, part.size)
                    if part.entries[slot].place != FREE:
                        written[0] = part.entries[slot]
                        written += 1
                        left -= 1
        return _restored, (entries,)

    cdef Entry* _find(self, uint64_t key) noexcept:
        cdef uint64_t hashed = key * FACTOR
        cdef Part* part = _part(self._parts, hashed)
        cdef uint32_t slot
        if not part.size:
            return NULL
        slot = _home(hashed, part.size)
        while part.entries[slot].place != FREE:
            if part.entries[slot].key == key:
                return &part.entries[slot]
            slot = _next(slot, part.size)
        return NULL

    cdef int _insert(self, uint64_t key, uint64_t place) except -1:
        cdef Part* part = _part(self._parts, key * FACTOR)
        if 5 * (part.used + 1) > 4 * part.size:
            _resize(part, part.size + part.size // 4 + SLOTS_MIN)
        _put(part.entries, part.size, key, place)
        part.used += 1
        self._entries += 1
        return 0

    cdef void _prefetch(self, const uint64_t* keys, Py_ssize_t count) noexcept:
        """Waits for memory once, not once a key."""
        cdef Py_ssize_t at
        cdef Part* part
        for at in range(count):
            part = _part(self._parts, keys[at] * FACTOR)
            if part.size:
                prefetch(&part.entries[_home(keys[at] * FACTOR, part.size)])

    def place(self, uint64_t key):
        cdef Entry* found = self._find(key)
        return found.place if found != NULL else -1

    def places(self, uint64_t key):
        cdef uint64_t hashed = key * FACTOR
        cdef Part* part = _part(self._parts, hashed)
        cdef uint32_t slot
        found = []
        if part.size:
            slot = _home(hashed, part.size)
            while part.entries[slot].place != FREE:
                if part.entries[slot].key == key:
                    found.append(part.entries[slot].place)
                slot = _next(slot, part.size)
        return found

    def insert(self, keys, const unsigned char[::1] packed, uint64_t place):
        cdef const uint64_t* key = <const uint64_t*>&packed[0] if packed.shape[0] else NULL
        cdef Py_ssize_t count = packed.shape[0] // 8, done = 0
        self._prefetch(key, count)
        while done < count and self._find(key[done]) == NULL:
            self._insert(key[done], place + done)
            done += 1
        return done

    def insert_again(self, uint64_t key, uint64_t place):
        self._insert(key, place)

    def delete(self, const unsigned char[::1] packed, uint64_t place):
        cdef const uint64_t* key = <const uint64_t*>&packed[0] if packed.shape[0] else NULL
        cdef Py_ssize_t at, count = packed.shape[0] // 8
        self._prefetch(key, count)
        for at in range(count):
            self._delete(key[at], place + at)

    cdef int _delete(self, uint64_t key, uint64_t place) except -1:
        cdef uint64_t hashed = key * FACTOR
        cdef Part* part = _part(self._parts, hashed)
        cdef Entry* entries = part.entries
        cdef uint32_t size = part.size, hole, slot, home
        if not size:
            raise AssertionError(f"block {key:016x} is not at its place")
        hole = _home(hashed, size)
        while entries[hole].key != key or entries[hole].place != place:
            if entries[hole].place == FREE:
                raise AssertionError(f"block {key:016x} is not at its place")
            hole = _next(hole, size)
        slot = hole
        while True:  # what follows moves up, unless it would come before its home
            slot = _next(slot, size)
            if entries[slot].place == FREE:
                break
            home = _home(entries[slot].key * FACTOR, size)
            if (hole < slot and (home <= hole or home > slot)) or (hole > slot and slot < home <= hole):
                entries[hole] = entries[slot]
                hole = slot
        entries[hole].place = FREE
        part.used -= 1
        self._entries -= 1
        if size > 4 * SLOTS_MIN and 3 * part.used < size:
            _resize(part, part.used + part.used // 2 + SLOTS_MIN)
        return 0

    def fill(self, const uint64_t[::1] keys, const uint64_t[::1] places):
        """An empty table."""
        cdef uint32_t* counts = <uint32_t*>PyMem_Calloc(PARTS, sizeof(uint32_t))
        cdef Py_ssize_t at
        cdef int part
        if counts == NULL:
            raise MemoryError
        for at in range(keys.shape[0]):
            counts[(keys[at] * FACTOR) >> (64 - PART_BITS)] += 1
        try:
            for part in range(PARTS):
                if counts[part]:
                    _resize(&self._parts[part], counts[part] + counts[part] // 3 + SLOTS_MIN)
        finally:
            PyMem_Free(counts)
        for at in range(keys.shape[0]):
            self._insert(keys[at], places[at])
