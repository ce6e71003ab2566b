// SPDX-License-Identifier: Apache-2.0
// The collectives: which of them MoECCL runs, and which stay with MPI.
//
// Ranks must decide alike. MPI requires the same count, type and operator of a reduction on all ranks, so these decide.
// The other collectives may describe matching data by different types on different ranks (a column here, a row there),
// so they always run on bytes: contiguous types in place, others packed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "shim/mpi/blocks.h"
#include "shim/mpi/comm.h"
#include "shim/mpi/progress.h"

namespace moeccl::shim {
namespace {

using Type = std::pair<MPI_Datatype, moecclDataType_t>;

// Fortran's types: a compiler's option may change their sizes, and an MPI may lack some.
void add_fortran(std::vector<Type>& to) {
  const auto add = [&to](MPI_Datatype type, moecclDataType_t of_4, moecclDataType_t of_8) {
    int bytes = 0;
    if (type == MPI_DATATYPE_NULL || PMPI_Type_size(type, &bytes) != MPI_SUCCESS) return;
    if (bytes == 4 || bytes == 8) to.emplace_back(type, bytes == 4 ? of_4 : of_8);
  };
  for (const MPI_Datatype type : {MPI_INTEGER, MPI_INTEGER4, MPI_INTEGER8}) add(type, moecclInt32, moecclInt64);
  for (const MPI_Datatype type : {MPI_REAL, MPI_DOUBLE_PRECISION, MPI_REAL4, MPI_REAL8})
    add(type, moecclFloat32, moecclFloat64);
}

std::vector<Type> types() {
  std::vector<Type> all = {
      {MPI_SIGNED_CHAR, moecclInt8},
      {MPI_INT8_T, moecclInt8},
      {MPI_UNSIGNED_CHAR, moecclUint8},
      {MPI_UINT8_T, moecclUint8},
      {MPI_INT, moecclInt32},
      {MPI_INT32_T, moecclInt32},
      {MPI_UNSIGNED, moecclUint32},
      {MPI_UINT32_T, moecclUint32},
      {MPI_LONG_LONG, moecclInt64},
      {MPI_INT64_T, moecclInt64},
      {MPI_AINT, moecclInt64},
      {MPI_OFFSET, moecclInt64},
      {MPI_COUNT, moecclInt64},
      {MPI_UINT64_T, moecclUint64},
      {MPI_UNSIGNED_LONG_LONG, moecclUint64},
      {MPI_FLOAT, moecclFloat32},
      {MPI_DOUBLE, moecclFloat64},
      {MPI_LONG, sizeof(long) == 8 ? moecclInt64 : moecclInt32},
      {MPI_UNSIGNED_LONG, sizeof(long) == 8 ? moecclUint64 : moecclUint32},
  };
  add_fortran(all);
  return all;
}

// Finds MoECCL's type for a predefined one that it reduces as MPI does.
bool reducible(MPI_Datatype type, moecclDataType_t* out) {
  static const auto* const kTypes = new std::vector<Type>(types());  // never destroyed: MPI may be used at exit
  for (const auto& [mpi, ours] : *kTypes) {
    if (mpi != type) continue;
    *out = ours;
    return true;
  }
  return false;
}

bool reducible(MPI_Op op, moecclRedOp_t* out) {
  if (op == MPI_SUM) {
    *out = moecclSum;
  } else if (op == MPI_PROD) {
    *out = moecclProd;
  } else if (op == MPI_MAX) {
    *out = moecclMax;
  } else if (op == MPI_MIN) {
    *out = moecclMin;
  } else {
    return false;
  }
  return true;
}

// Returns true for what MPI refuses. It then gets the call, so that its own error goes to its own handler.
bool refused(const void* written, MPI_Count count, MPI_Datatype type) {
  return written == MPI_IN_PLACE || count < 0 || type == MPI_DATATYPE_NULL;
}

struct Reduction {
  moecclDataType_t type = moecclInt8;
  moecclRedOp_t op = moecclSum;
  bool found = false;  // otherwise MPI runs it
};

Reduction find_reduction(const void* recv, MPI_Count count, MPI_Datatype type, MPI_Op op) {
  Reduction r;
  r.found = !refused(recv, count, type) && reducible(type, &r.type) && reducible(op, &r.op);
  return r;
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const auto at = reinterpret_cast<uintptr_t>(a), there = reinterpret_cast<uintptr_t>(b);
  return at < there + b_bytes && there < at + a_bytes;
}

// In place of NULL: a program that opens a group of MoECCL's does not know its MPI calls to be MoECCL's, and they are
// no part of it. The number is kAlone in src/api/collectives.cc.
const auto alone = reinterpret_cast<moecclStream_t>(uintptr_t{0xC2});

Outcome done(int code) { return {.served = true, .code = code}; }

// After a failure, prints MoECCL's message.
Outcome result(const char* function, moecclResult_t code) {
  if (code == moecclSuccess) return done(MPI_SUCCESS);
  std::fprintf(stderr, "moeccl-mpi: MPI_%s: %s\n", function, moecclGetLastError(nullptr));
  return done(MPI_ERR_OTHER);
}

Outcome no_pack(const char* function) {
  std::fprintf(stderr, "moeccl-mpi: MPI_%s: a datatype could not be packed\n", function);
  return done(MPI_ERR_TYPE);
}

namespace core {

Outcome Allreduce(const Served& s, const void* send, void* recv, MPI_Count count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm) {
  const Reduction r = find_reduction(recv, count, type, op);
  // Passing one buffer as both, without MPI_IN_PLACE, is an error that MPI itself reports (Open MPI: for more than one
  // element).
  const bool same = send == recv && count > 1;
  if (!r.found || same) return {};
  const void* from = send == MPI_IN_PLACE ? recv : send;
  return result("Allreduce", moecclAllReduce(from, recv, static_cast<size_t>(count), r.type, r.op, s.comm, alone));
}

Outcome Reduce(const Served& s, const void* send, void* recv, MPI_Count count, MPI_Datatype type, MPI_Op op, int root,
               MPI_Comm) {
  const Reduction r = find_reduction(nullptr, count, type, op);
  if (!r.found || root < 0 || root >= s.n_ranks) return {};
  const bool is_root = root == s.rank;
  // MPI's own call would not do: an MPI that does not check this would wait for the other ranks, which are here.
  // Without elements, Open MPI accepts one buffer.
  if (is_root ? recv == MPI_IN_PLACE || (send == recv && count > 0) : send == MPI_IN_PLACE) {
    std::fprintf(stderr, "moeccl-mpi: MPI_Reduce: the send and receive buffers of rank %d of %d (root %d) %s\n", s.rank,
                 s.n_ranks, root,
                 send == recv ? "are one: pass MPI_IN_PLACE as the send buffer"
                              : "are wrong: MPI_IN_PLACE is for the root's send buffer only");
    return done(MPI_ERR_BUFFER);
  }
  const void* from = send == MPI_IN_PLACE ? recv : send;
  void* to = is_root ? recv : nullptr;  // MPI lets the other ranks pass anything
  return result("Reduce", moecclReduce(from, to, static_cast<size_t>(count), r.type, r.op, root, s.comm, alone));
}

Outcome Reduce_scatter_block(const Served& s, const void* send, void* recv, MPI_Count count, MPI_Datatype type,
                             MPI_Op op, MPI_Comm) {
  const Reduction r = find_reduction(recv, count, type, op);
  if (!r.found) return {};
  const auto n = static_cast<size_t>(count);
  const size_t bytes = n * moecclTypeSize(r.type), all = bytes * static_cast<size_t>(s.n_ranks);
  const void* from = send == MPI_IN_PLACE ? recv : send;
  if (!overlap(from, all, recv, bytes)) {
    return result("Reduce_scatter_block", moecclReduceScatter(from, recv, n, r.type, r.op, s.comm, alone));
  }
  // In place, MPI's result lies at the start of recv and MoECCL's where this rank's block is; neither may touch the
  // rest. Buffers that overlap otherwise are wrong in MPI, but Open MPI takes them.
  const Scratch own = scratch(bytes);
  const moecclResult_t ended = moecclReduceScatter(from, own.get(), n, r.type, r.op, s.comm, alone);
  if (ended == moecclSuccess) std::memcpy(recv, own.get(), bytes);
  return result("Reduce_scatter_block", ended);
}

Outcome Bcast(const Served& s, void* buffer, MPI_Count count, MPI_Datatype type, int root, MPI_Comm comm) {
  if (refused(buffer, count, type) || root < 0 || root >= s.n_ranks) return {};
  const auto n = static_cast<size_t>(count);
  const size_t bytes = payload(type, n);
  if (contiguous(type)) {
    return result("Bcast", moecclBroadcast(buffer, buffer, bytes, moecclUint8, root, s.comm, alone));
  }
  const Scratch packed = scratch(bytes);
  if (s.rank == root && !pack(buffer, n, type, packed.get(), comm)) return no_pack("Bcast");
  const moecclResult_t ended = moecclBroadcast(packed.get(), packed.get(), bytes, moecclUint8, root, s.comm, alone);
  if (ended == moecclSuccess && s.rank != root && !unpack(packed.get(), buffer, n, type, comm)) {
    return no_pack("Bcast");
  }
  return result("Bcast", ended);
}

// Runs Allgather and Alltoall: recv has a block from each rank; send has one block, or one for each rank.
Outcome exchange(const Served& s, const char* function, const void* send, MPI_Count send_count, MPI_Datatype send_type,
                 void* recv, MPI_Count recv_count, MPI_Datatype recv_type, MPI_Comm comm, bool all_to_all) {
  const bool in_place = send == MPI_IN_PLACE;
  if (refused(recv, recv_count, recv_type) || (!in_place && refused(nullptr, send_count, send_type))) return {};
  const auto n = static_cast<size_t>(s.n_ranks), rank = static_cast<size_t>(s.rank);
  const auto n_send = static_cast<size_t>(send_count), n_recv = static_cast<size_t>(recv_count);
  const size_t block = payload(recv_type, n_recv);
  // MPI's own call would not do: on one rank alone it would wait for the others, which are here.
  if (!in_place && payload(send_type, n_send) != block) {
    std::fprintf(stderr, "moeccl-mpi: MPI_%s: a block to send has %zu bytes, and one to receive %zu\n", function,
                 payload(send_type, n_send), block);
    return done(MPI_ERR_TRUNCATE);
  }
  Scratch packed_send, packed_recv;
  char* to = static_cast<char*>(recv);
  if (!contiguous(recv_type)) {
    packed_recv = scratch(block * n);
    to = packed_recv.get();
    // In place, the data to send lies in recv.
    const size_t first = all_to_all ? 0 : rank * n_recv, count = all_to_all ? n * n_recv : n_recv;
    char* place = all_to_all ? to : to + block * rank;
    if (in_place && !pack(element(recv, recv_type, static_cast<ptrdiff_t>(first)), count, recv_type, place, comm)) {
      return no_pack(function);
    }
  }
  const void* from = send;
  if (in_place) {
    from = all_to_all ? to : to + block * rank;
  } else if (!contiguous(send_type)) {
    const size_t count = all_to_all ? n * n_send : n_send;
    packed_send = scratch(payload(send_type, count));
    if (!pack(send, count, send_type, packed_send.get(), comm)) return no_pack(function);
    from = packed_send.get();
  }
  const moecclResult_t ended = all_to_all ? moecclAllToAll(from, to, block, moecclUint8, s.comm, alone)
                                          : moecclAllGather(from, to, block, moecclUint8, s.comm, alone);
  if (ended == moecclSuccess && packed_recv != nullptr && !unpack(to, recv, n * n_recv, recv_type, comm)) {
    return no_pack(function);
  }
  return result(function, ended);
}

Outcome Allgather(const Served& s, const void* send, MPI_Count send_count, MPI_Datatype send_type, void* recv,
                  MPI_Count recv_count, MPI_Datatype recv_type, MPI_Comm comm) {
  return exchange(s, "Allgather", send, send_count, send_type, recv, recv_count, recv_type, comm, false);
}

Outcome Alltoall(const Served& s, const void* send, MPI_Count send_count, MPI_Datatype send_type, void* recv,
                 MPI_Count recv_count, MPI_Datatype recv_type, MPI_Comm comm) {
  return exchange(s, "Alltoall", send, send_count, send_type, recv, recv_count, recv_type, comm, true);
}

// One side of an Alltoallv in bytes. Packed sides are dense, in the order of the ranks.
struct Side {
  size_t *bytes, *displs;
  size_t end = 0;  // of the last byte, from `data` on
  Scratch packed;
  char* data = nullptr;
  int n;

  // `layout`: room for 2 n numbers, the bytes and displs.
  template <class Count, class Displ>
  Side(const void* base, const Count* counts, const Displ* displs_in, MPI_Datatype type, int n_ranks, bool always_pack,
       size_t* layout)
      : bytes(layout), displs(layout + n_ranks), data(static_cast<char*>(const_cast<void*>(base))), n(n_ranks) {
    const auto [element_bytes, dense] = shape_of(type);
    for (int r = 0; r < n; ++r) {
      bytes[r] = element_bytes * static_cast<size_t>(counts[r]);
      // MPI does not look at the place of an empty block.
      displs[r] = bytes[r] == 0 ? 0 : element_bytes * static_cast<size_t>(displs_in[r]);
      if (bytes[r] > 0) end = std::max(end, displs[r] + bytes[r]);
    }
    if (!dense || always_pack) make_packed();
  }
  void make_packed() {
    end = 0;
    for (int r = 0; r < n; ++r) {
      displs[r] = end;
      end += bytes[r];
    }
    packed = scratch(end);
    data = packed.get();
  }
  bool meets(const Side& other) const { return overlap(data, end, other.data, other.end); }
};

template <class Count, class Displ>
Outcome Alltoallv(const Served& s, const void* send, const Count* send_counts, const Displ* send_displs,
                  MPI_Datatype send_type, void* recv, const Count* recv_counts, const Displ* recv_displs,
                  MPI_Datatype recv_type, MPI_Comm comm) {
  const auto wrong = [&s](const void* to, const Count* counts, const Displ* displs, MPI_Datatype type) {
    return counts == nullptr || displs == nullptr || refused(to, *std::min_element(counts, counts + s.n_ranks), type);
  };
  if (wrong(recv, recv_counts, recv_displs, recv_type) ||
      (send != MPI_IN_PLACE && wrong(nullptr, send_counts, send_displs, send_type))) {
    return {};
  }
  const bool in_place = send == MPI_IN_PLACE;
  if (in_place) {  // send what recv describes from a copy, because MoECCL's form is out of place
    send = recv;
    send_counts = recv_counts;
    send_displs = recv_displs;
    send_type = recv_type;
  }
  const int n = s.n_ranks;
  // Displacements before the buffer are legal in MPI but not in MoECCL, so such a side is packed as well.
  const auto any_negative = [n](const Count* counts, const Displ* displs) {
    for (int r = 0; r < n; ++r) {
      if (counts[r] > 0 && displs[r] < 0) return true;
    }
    return false;
  };
  size_t* const layout = s.layout.get();  // kept, because small calls cost little more than an allocation
  const bool packs = in_place || any_negative(send_counts, send_displs);
  Side out(send, send_counts, send_displs, send_type, n, packs, layout);
  Side in(recv, recv_counts, recv_displs, recv_type, n, any_negative(recv_counts, recv_displs), layout + 2 * n);
  // In MPI, blocks to send and to receive may lie between one another in one array. In MoECCL they may not.
  if (out.meets(in)) out.make_packed();
  for (size_t r = 0; r < static_cast<size_t>(n) && out.packed != nullptr; ++r) {
    const auto count = static_cast<size_t>(send_counts[r]);
    if (!pack(element(send, send_type, send_displs[r]), count, send_type, out.data + out.displs[r], comm)) {
      return no_pack("Alltoallv");
    }
  }
  const moecclResult_t ended =
      moecclAllToAllv(out.data, out.bytes, out.displs, in.data, in.bytes, in.displs, moecclUint8, s.comm, alone);
  for (size_t r = 0; r < static_cast<size_t>(n) && in.packed != nullptr && ended == moecclSuccess; ++r) {
    const auto count = static_cast<size_t>(recv_counts[r]);
    if (!unpack(in.data + in.displs[r], element(recv, recv_type, recv_displs[r]), count, recv_type, comm)) {
      return no_pack("Alltoallv");
    }
  }
  return result("Alltoallv", ended);
}

}  // namespace core

}  // namespace
}  // namespace moeccl::shim

#include "shim/mpi/export_table.inc"
