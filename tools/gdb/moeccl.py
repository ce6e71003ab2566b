# SPDX-License-Identifier: Apache-2.0
"""For gdb, on a process or a core (docs/debugging.md): shows the last operations of every communicator.

  gdb -p PID -batch -x tools/gdb/moeccl.py -ex moeccl-flight

  moeccl-flight [N]   the newest N operations (16) of each communicator, which of them run, and what each has heard of its peers

Needs no debugging information and no symbols: the library keeps a directory in its data, src/exec/flight_directory.cc,
which says where everything is."""
import re
import struct
import time

import gdb

MAGIC = b"MoECCL flight 01"
# The words of struct Directory behind the magic.
NUMBERS = ("record_bytes n_records records_at count_at sequence_at op_at type_at reduce_at root_at elements_at has_plan_at algorithm_at "
           "start_at end_at state_at n_ops n_types n_operators ops types").split()
RUNNING, DONE, DONE_UNTIMED, FAILED = range(4)  # Record::State
MOST_COMMUNICATORS = 4096  # a longer list is not ours


def memory(address, n):
    return bytes(gdb.selected_inferior().read_memory(address, n))


def words(address, n):
    return struct.unpack(f"<{n}Q", memory(address, 8 * n))


def text(address):
    """Returns the C string there."""
    if address == 0:
        return ""
    out = b""
    while b"\0" not in out and len(out) < 256:
        try:
            out += memory(address + len(out), 16)
        except gdb.MemoryError:
            out += memory(address + len(out), 1)
    return out.split(b"\0")[0].decode(errors="replace")


class Directory:
    def __init__(self, address):
        at = address + len(MAGIC)
        for name, value in zip(NUMBERS, words(at, len(NUMBERS))):
            setattr(self, name, value)
        at += 8 * len(NUMBERS)
        self.names = {"op": [text(a) for a in words(self.ops, self.n_ops)], "type": [text(a) for a in words(self.types, self.n_types)],
                      "reduce": [text(a) for a in words(at, self.n_operators)]}
        at += 8 * self.n_operators
        self.ticks, self.since_epoch_ns, self.ns_per_tick, self.first = struct.unpack("<qqdQ", memory(at, 32))

    def entries(self):
        """Yields the list's members: (rank, n_ranks, cuda, page, entered, finished)."""
        seen, at = 0, self.first
        while at and seen < MOST_COMMUNICATORS:
            following, rank, n_ranks, cuda, page, entered, finished = words(at, 7)
            yield rank, n_ranks, memory(cuda, 1) != b"\0", page, entered, finished
            at, seen = following, seen + 1

    def name(self, kind, number):
        return self.names[kind][number] if number < len(self.names[kind]) else f"{kind} {number}"

    def when(self, ticks):
        """Returns seconds since 1970."""
        return (self.since_epoch_ns + (ticks - self.ticks) * self.ns_per_tick) / 1e9

    def record(self, at, now):
        raw = memory(at, self.record_bytes)

        def number(where, n):
            return int.from_bytes(raw[where:where + n], "little")

        def ticks(where):
            return struct.unpack_from("<q", raw, where)[0]

        sequence, state = number(self.sequence_at, 8), number(self.state_at, 1)
        plan = raw[self.algorithm_at:].split(b"\0")[0].decode(errors="replace") if raw[self.has_plan_at] else ""
        start = self.when(ticks(self.start_at))
        line = (f"#{sequence} " if sequence else "") + (
            f"{self.name('op', number(self.op_at, 1))} count {number(self.elements_at, 8)} {self.name('type', number(self.type_at, 1))} "
            f"{self.name('reduce', number(self.reduce_at, 1))} root {number(self.root_at, 4)} plan {plan or 'not chosen yet'} "
            f"{('RUNNING', 'done', 'done', 'FAILED')[state] if state <= FAILED else f'state {state}'}")
        if state == RUNNING and now is not None:
            line += f" for {now - start:.3f} s"
        elif state in (DONE, FAILED):
            line += f" after {(ticks(self.end_at) - ticks(self.start_at)) * self.ns_per_tick / 1e6:.3f} ms"
        return f"{line}, since {time.strftime('%H:%M:%S', time.localtime(start))}.{int(start % 1 * 1000):03}"


def directories():
    """Yields one for each library or program that holds MoECCL: the shims' plugins carry parts of it too."""
    sections = gdb.execute("info files", to_string=True)
    for begin, end in re.findall(r"^\s*(0x[0-9a-f]+) - (0x[0-9a-f]+) is \.data\b(?!\.)", sections, flags=re.M):
        begin, end = int(begin, 16), int(end, 16)
        try:
            data = memory(begin, end - begin)
        except gdb.MemoryError:
            continue
        found = data.find(MAGIC)
        if found >= 0:
            yield Directory(begin + found)


def is_core():
    connection = getattr(gdb.selected_inferior(), "connection", None)
    return connection is not None and connection.type == "core"


class Flight(gdb.Command):
    """moeccl-flight [N]: the newest N operations (16) of each of MoECCL's communicators in this process or core."""

    def __init__(self):
        super().__init__("moeccl-flight", gdb.COMMAND_DATA)

    def invoke(self, argument, _from_tty):
        if argument and not (argument.isdigit() and int(argument) > 0):
            raise gdb.GdbError(f"moeccl-flight: '{argument}' is no number of operations: give 1 or more, or nothing for 16")
        if gdb.selected_inferior().pid == 0:
            raise gdb.GdbError("moeccl-flight: no process and no core: start gdb with -p PID, or with a program and its core")
        most = int(argument or 16)
        now = None if is_core() else time.time()
        any_library = any_communicator = False
        for directory in directories():
            any_library = True
            for entry in directory.entries():
                any_communicator = True
                self.show(directory, entry, most, now)
        if not any_library:
            raise gdb.GdbError("moeccl-flight: no loaded library has MoECCL's directory: it is older than 0.1, or gdb does not see the "
                               "process's libraries ('info sharedlibrary'; for a core of another machine 'set sysroot')")
        if not any_communicator:
            print("no communicator: none was made, or all are destroyed")

    @staticmethod
    def show(directory, entry, most, now):
        rank, n_ranks, cuda, page, entered, finished = entry
        count = words(page + directory.count_at, 1)[0]
        print(f"rank {rank} of {n_ranks}, {'CUDA' if cuda else 'host'} memory: {count} operations")
        for i in range(count - min(most, count, directory.n_records), count):
            at = page + directory.records_at + i % directory.n_records * directory.record_bytes
            print("  " + directory.record(at, now))
        peers = [f"rank {r} #{max(e, f)}" for r, (e, f) in enumerate(zip(words(entered, n_ranks), words(finished, n_ranks)))
                 if r != rank and max(e, f)]
        if peers:
            print("  newest operation that it has heard of: " + ", ".join(peers))


Flight()
