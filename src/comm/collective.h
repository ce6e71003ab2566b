// SPDX-License-Identifier: Apache-2.0
// From a C call's arguments to a prepared operation. Checks come first; their sentences name argument, value and
// remedy.
#pragma once

#include "src/comm/collective_call.h"
#include "src/comm/communicator.h"

namespace moeccl::comm {

// Returns the failure for an argument that is not accepted.
inline Status bad(moecclOp_t op, const char* argument, const std::string& value, const std::string& wanted) {
  return error(moecclInvalidArgument, "{}: {} is {}: give {}", plan::op_name(op), argument, value, wanted);
}
// Returns true if [a, a+na) and [b, b+nb) share a byte.
inline bool overlap(const void* a, uint64_t na, const void* b, uint64_t nb) {
  const auto x = reinterpret_cast<uint64_t>(a), y = reinterpret_cast<uint64_t>(b);
  return na > 0 && nb > 0 && x < y + nb && y < x + na;
}
// The maximum size of one buffer: what 64-bit processors can address in a process. Sums and products of a few such
// sizes do not overflow.
inline constexpr uint64_t kMostBufferBytes = uint64_t{1} << 56;
// The maximum size of one expert, for replicas and for migration.
inline constexpr uint64_t kMostExpertElements = uint64_t{1} << 36;
// Returns true if `blocks` blocks of count elements can be a buffer.
inline bool fits_in_memory(uint64_t count, uint64_t element_bytes, uint64_t blocks) {
  return count <= kMostBufferBytes / (element_bytes * blocks);
}

// Checks that a rank's buffers of this operation could exist.
Status check_count(const plan::LevelTree& tree, moecclOp_t op, uint64_t count, uint64_t element_bytes);

// Fills `op`, which must outlive its run.
Status prepare_collective(Communicator& comm, const CollectiveCall& call, exec::Operation& op);
// Returns how a call on `stream` (null: none) was prepared. Peers know nothing of a fault of this rank alone, unlike of
// a wrong argument, and would wait for it, so such a fault ends the communicator, except while the stream is captured:
// peers run nothing then.
Status or_break_off(Communicator& comm, Stream* stream, Status prepared);
// Runs the collective and blocks. Only for calls outside of groups.
Status run_collective(Communicator& comm, const CollectiveCall& call);
// Checks a Send or Recv and fills `message`.
Status prepare_message(Communicator& comm, const void* data, size_t count, moecclDataType_t type, int peer,
                       bool is_send, exec::Message& message);
Status create_premul(Communicator& comm, const void* scalar, moecclDataType_t type, moecclRedOp_t* op);
Status destroy_premul(Communicator& comm, moecclRedOp_t op);

}  // namespace moeccl::comm
